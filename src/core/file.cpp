// Reading, atomic writing and flushing of files.
#include "core/file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

[[noreturn]] void fail_system(const char* what, const std::filesystem::path& path, int error) {
  fail("[file] cannot {} {}: {}", what, path.string(), std::strerror(error));
}

// An open descriptor, closed on destruction.
class Descriptor {
 public:
  Descriptor(const std::filesystem::path& path, int flags)
      : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ < 0) {
      fail_system("open", path, errno);
    }
  }

  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor(Descriptor&&) = delete;
  Descriptor& operator=(Descriptor&&) = delete;

  ~Descriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }

  int get() const { return fd_; }

  // Some file systems report a full disk only here.
  bool close() { return ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

void flush(const std::filesystem::path& path, int flags) {
  const Descriptor descriptor(path, flags);
  if (::fsync(descriptor.get()) != 0) {
    fail_system("flush", path, errno);
  }
}

void write_and_flush(const std::filesystem::path& path, std::string_view text) {
  Descriptor descriptor(path, O_WRONLY | O_CREAT | O_TRUNC);
  while (!text.empty()) {
    const ssize_t written = ::write(descriptor.get(), text.data(), text.size());
    if (written < 0 && errno == EINTR) {
      continue;
    }
    if (written < 0) {
      fail_system("write", path, errno);
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  if (::fsync(descriptor.get()) != 0 || !descriptor.close()) {
    fail_system("flush", path, errno);
  }
}

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  const Descriptor descriptor(path, O_RDONLY);
  std::string text;
  constexpr std::size_t kPiece = std::size_t{1} << 16;
  while (true) {
    const std::size_t size = text.size();
    text.resize(size + kPiece);
    const ssize_t got = ::read(descriptor.get(), text.data() + size, kPiece);
    const int error = errno;
    text.resize(size + static_cast<std::size_t>(got > 0 ? got : 0));
    if (got == 0) {
      return text;
    }
    if (got < 0 && error != EINTR) {
      fail_system("read", path, error);
    }
  }
}

void write_file_atomically(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path temporary = fmt::format("{}.tmp.{}", path.string(), ::getpid());
  try {
    write_and_flush(temporary, text);
    if (::rename(temporary.c_str(), path.c_str()) != 0) {
      fail_system("rename to", path, errno);
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  fsync_directory(path.has_parent_path() ? path.parent_path() : ".");
}

void fsync_file(const std::filesystem::path& path) {
  flush(path, O_RDONLY);
}

void fsync_directory(const std::filesystem::path& path) {
  flush(path, O_RDONLY | O_DIRECTORY);
}

}  // namespace bifocal
