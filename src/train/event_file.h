// TensorBoard's event files: what a run's scalars look like to the tool that many labs watch runs
// with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bifocal {

// CRC-32C (Castagnoli polynomial) of some bytes.
std::uint32_t crc32c(std::string_view bytes);

// Appends records to a new file events.out.tfevents.<seconds>.<host>.<process> of a directory. A
// record is a length, its checksum, a protocol buffer of type Event, and its checksum (TFRecord).
class EventFile {
 public:
  using Scalars = std::vector<std::pair<std::string, double>>;  // tag, value

  // Makes the directory. What earlier files hold of steps from first_step on is void: readers drop
  // it. Throws Error where the file cannot be written.
  EventFile(const std::filesystem::path& directory, std::int64_t first_step);

  // The scalars of one step, flushed. Throws Error when writing fails.
  void write(std::int64_t step, const Scalars& scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  void append(const std::string& event);

  std::filesystem::path path_;
  std::ofstream stream_;
};

}  // namespace bifocal
