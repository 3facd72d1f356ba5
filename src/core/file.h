// Whole files, and what makes them survive a crash.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace bifocal {

// The bytes of a file. Throws Error naming the file.
std::string read_file(const std::filesystem::path& path);

// Replaces a file so that a crash leaves the old bytes or the new ones: writes a temporary file
// beside it, flushes it to the disk, renames it and flushes the directory.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);

// Flushes a file's bytes, or a directory's entries, to the disk.
void fsync_file(const std::filesystem::path& path);
void fsync_directory(const std::filesystem::path& path);

}  // namespace bifocal
