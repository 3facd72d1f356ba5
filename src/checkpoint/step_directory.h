// The step_N directories of a run: which are complete, and how one is published, replaced and
// removed so that a crash at any time leaves complete ones or nothing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "checkpoint/checkpoint.h"

namespace bifocal {

std::filesystem::path step_path(const std::filesystem::path& directory, std::int64_t step);

// Where step_N is written before it is complete.
std::filesystem::path unfinished_path(const std::filesystem::path& directory, std::int64_t step);

// The steps whose manifest is valid, newest first. Throws NewerFormatError if `directory` holds one
// of a newer format; empty if there is no such directory.
std::vector<std::int64_t> complete_steps(const std::filesystem::path& directory);

// Removes what interrupted saves and removals left behind.
void remove_unfinished(const std::filesystem::path& directory);

// Gives the unfinished directory of `step`, in which everything is flushed, its final name, then
// points the file `latest` to it.
void publish_step(const std::filesystem::path& directory, std::int64_t step);

// Removes complete steps that `keep` does not spare, but never `written`.
void remove_old_steps(const std::filesystem::path& directory,
                      const KeepRule& keep,
                      std::int64_t written);

}  // namespace bifocal
