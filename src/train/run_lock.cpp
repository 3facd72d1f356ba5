// Rank 0 tries an exclusive lock, which no other job's rank may share, then all ranks share one.
#include "train/run_lock.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/file.h>
#include <thread>
#include <unistd.h>

#include "checkpoint/run_together.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "core/process.h"

namespace bifocal {

namespace {

// Whether the lock was taken; also where the file system has none.
bool try_lock(int file, int kind) {
  while (::flock(file, kind | LOCK_NB) != 0) {
    if (errno != EINTR) {
      return errno != EWOULDBLOCK;
    }
  }
  return true;
}

void require_lock(int file, const std::filesystem::path& path, int kind, double patience) {
  const Stopwatch watch;
  while (!try_lock(file, kind)) {
    BIFOCAL_REQUIRE(watch.seconds() < patience,
                    "[train] {} is in use by another job ({}): wait until it has ended, or set "
                    "another run.directory",
                    path.parent_path().string(),
                    read_file(path));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

// Who holds the lock, for people; the text. Empty where it could not be written: then nothing rests
// on it.
std::string sign(int file) {
  const std::string text = fmt::format("rank 0: process {} on {}", ::getpid(), host_name());
  const bool is_written =
      ::ftruncate(file, 0) == 0 &&
      ::pwrite(file, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
  return is_written ? text : "";
}

}  // namespace

RunLock::RunLock(const std::filesystem::path& directory, Communicator& group, double patience) {
  const std::filesystem::path path = directory / "run.lock";
  try {
    run_together(group, [&] {
      file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      BIFOCAL_REQUIRE(
          file_ >= 0, "[train] cannot open {}: {}", path.string(), std::strerror(errno));
    });
    std::string signature;
    run_together(group, [&] {
      if (group.rank() == 0) {
        require_lock(file_, path, LOCK_EX, patience);
        signature = sign(file_);
        require_lock(file_, path, LOCK_SH, patience);
      }
    });
    run_together(group, [&] { require_lock(file_, path, LOCK_SH, patience); });
    // Sharing a lock that was held alone gives it up for a moment, in which another job may have
    // come and gone the same way: whoever signed last goes on.
    run_together(group, [&] {
      BIFOCAL_REQUIRE(signature.empty() || read_file(path) == signature,
                      "[train] {} was taken by another job at the same moment ({}): wait until it "
                      "has ended, or set another run.directory",
                      directory.string(),
                      read_file(path));
    });
  } catch (...) {
    ::close(file_);
    throw;
  }
}

RunLock::~RunLock() {
  ::close(file_);
}

}  // namespace bifocal
