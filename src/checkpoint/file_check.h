// Whether a file of a checkpoint is the one that was written.
#pragma once

#include <cstddef>
#include <filesystem>

#include "checkpoint/manifest.h"

namespace bifocal {

// Throws Error, naming the file, unless manifest.files[file] in that directory has its size and
// SHA-256. Where the manifest knows the chunks, the text says in which dataset the damage lies. The
// file is not opened as HDF5.
void check_rank_file(const std::filesystem::path& checkpoint,
                     const Manifest& manifest,
                     std::size_t file);

}  // namespace bifocal
