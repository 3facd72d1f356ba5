// A directory that appears only when everything in it is whole.
#pragma once

#include <filesystem>
#include <string>

namespace bifocal {

// Files are made in "NAME.partial", which is renamed to NAME when it is published and removed when
// it is not. A lock in it, which ends with its process, tells a directory in use from one that a
// killed run left behind; the latter is emptied and taken over.
class StagedDirectory {
 public:
  // Throws Error where NAME holds something already, where another run is making it, and where
  // NAME.partial holds a file that is no token shard: it is then somebody else's.
  explicit StagedDirectory(const std::string& name);
  // Removes what was not published.
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;
  StagedDirectory(StagedDirectory&&) = delete;
  StagedDirectory& operator=(StagedDirectory&&) = delete;

  // Where files are made.
  const std::filesystem::path& staged() const { return staged_; }

  // Flushes the directory to the disk and gives it its name.
  void publish();

 private:
  bool lock();
  void take_over();

  std::filesystem::path path_;
  std::filesystem::path staged_;
  std::filesystem::path lock_path_;
  int lock_ = -1;
};

}  // namespace bifocal
