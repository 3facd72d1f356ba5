// A fuzzer's bytes as a file, for readers that take a path.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace bifocal::test {

// In memory; gone with the process, however it ends.
class InputFile {
 public:
  InputFile() : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (fd_ < 0) {
      std::abort();
    }
  }

  ~InputFile() { close(fd_); }

  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  InputFile(InputFile&&) = delete;
  InputFile& operator=(InputFile&&) = delete;

  // The path of a file with these bytes, until the next call.
  std::string with(std::span<const std::uint8_t> bytes) const {
    if (ftruncate(fd_, 0) != 0 ||
        pwrite(fd_, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      std::abort();
    }
    return "/proc/self/fd/" + std::to_string(fd_);
  }

 private:
  int fd_;
};

}  // namespace bifocal::test
