// Locking, taking over and publishing of staged directories.
#include "data/staged_directory.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <regex>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "core/error.h"
#include "core/file.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = ".lock";

bool is_ours(const fs::path& file) {
  static const std::regex pattern(R"((train|held_out)-\d{5,}\.h5(\.partial)?)");
  const std::string name = file.filename().string();
  return name == kLock || std::regex_match(name, pattern);
}

// The lock goes last: while it is there, nobody else puts files beside it.
void remove_contents(const fs::path& directory) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, ignored)) {
    if (entry.path().filename() != kLock) {
      fs::remove(entry.path(), ignored);
    }
  }
}

bool is_same_file(int descriptor, const fs::path& path) {
  struct stat mine {};

  struct stat named {};

  return ::fstat(descriptor, &mine) == 0 && ::stat(path.c_str(), &named) == 0 &&
         mine.st_ino == named.st_ino && mine.st_dev == named.st_dev;
}

}  // namespace

StagedDirectory::StagedDirectory(const std::string& name)
    : path_(fs::path(name).lexically_normal()) {
  if (!path_.has_filename()) {
    path_ = path_.parent_path();  // "name/"
  }
  BIFOCAL_REQUIRE(path_.has_filename() && path_.filename() != "." && path_.filename() != "..",
                  "[tokenize] wanted the name of a directory to make, got \"{}\"",
                  name);
  staged_ = path_;
  staged_ += ".partial";
  lock_path_ = staged_ / kLock;
  std::error_code code;
  if (path_.has_parent_path()) {
    fs::create_directories(path_.parent_path(), code);
    BIFOCAL_REQUIRE(
        !code, "[tokenize] cannot make {}: {}", path_.parent_path().string(), code.message());
  }
  // A run that ends while we take its lock removes or renames the directory under our feet.
  while (!lock()) {
  }
  try {
    take_over();
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

// Makes NAME.partial where it is not there and locks it. False where the lock turned out to be that
// of a directory that is no more.
bool StagedDirectory::lock() {
  if (::mkdir(staged_.c_str(), 0777) != 0) {
    BIFOCAL_REQUIRE(
        errno == EEXIST, "[tokenize] cannot make {}: {}", staged_.string(), std::strerror(errno));
    std::error_code code;
    const fs::file_type type = fs::symlink_status(staged_, code).type();
    BIFOCAL_REQUIRE(type == fs::file_type::directory || type == fs::file_type::not_found,
                    "[tokenize] {} is in the way: remove it, or name another --output",
                    staged_.string());
    for (const fs::directory_entry& entry : fs::directory_iterator(staged_, code)) {
      BIFOCAL_REQUIRE(is_ours(entry.path()),
                      "[tokenize] {} holds {}, which no run of tokenize writes: move it away, "
                      "or name another --output",
                      staged_.string(),
                      entry.path().filename().string());
    }
  }
  lock_ = ::open(lock_path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) {
    BIFOCAL_REQUIRE(errno == ENOENT,
                    "[tokenize] cannot write to {}: {}",
                    staged_.string(),
                    std::strerror(errno));
    return false;
  }
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::close(lock_);
    BIFOCAL_REQUIRE(error != EWOULDBLOCK,
                    "[tokenize] another run is writing {} now: wait for it, or name another "
                    "--output",
                    path_.string());
    fail("[tokenize] cannot lock {}: {}: name an --output on a file system that has locks",
         lock_path_.string(),
         std::strerror(error));
  }
  if (!is_same_file(lock_, lock_path_)) {
    ::close(lock_);
    return false;
  }
  return true;
}

void StagedDirectory::take_over() {
  std::error_code code;
  remove_contents(staged_);
  const bool is_free = !fs::exists(path_, code) ||
                       (fs::is_directory(path_, code) && fs::is_empty(path_, code) && !code);
  if (!is_free) {
    fs::remove(lock_path_, code);
    fs::remove(staged_, code);
    fail("[tokenize] {} holds something already: name another directory, or remove it",
         path_.string());
  }
}

StagedDirectory::~StagedDirectory() {
  if (lock_ < 0) {
    return;
  }
  std::error_code ignored;
  remove_contents(staged_);
  fs::remove(lock_path_, ignored);
  fs::remove(staged_, ignored);
  ::close(lock_);
}

void StagedDirectory::publish() {
  fsync_directory(staged_);
  std::error_code code;
  fs::rename(staged_, path_, code);
  BIFOCAL_REQUIRE(!code,
                  "[tokenize] cannot rename {} to {}: {}",
                  staged_.string(),
                  path_.string(),
                  code.message());
  // The lock goes only now: without it another run could take the directory over before it has its
  // name.
  fs::remove(path_ / kLock, code);
  ::close(std::exchange(lock_, -1));
  fsync_directory(path_.has_parent_path() ? path_.parent_path() : ".");
}

}  // namespace bifocal
