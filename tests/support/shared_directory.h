// A directory that all ranks of a test see, removed when every rank is done with it.
#pragma once

#include <filesystem>
#include <optional>

#include "support/mpi_world.h"
#include "support/temporary_directory.h"

namespace bifocal::test {

class SharedDirectory {
 public:
  SharedDirectory() {
    if (test_world().rank() == 0) {
      directory_.emplace();
    }
    path_ = broadcast_text(test_world(), directory_ ? directory_->path() : "", 0);
  }

  ~SharedDirectory() { test_world().barrier(); }

  SharedDirectory(const SharedDirectory&) = delete;
  SharedDirectory& operator=(const SharedDirectory&) = delete;
  SharedDirectory(SharedDirectory&&) = delete;
  SharedDirectory& operator=(SharedDirectory&&) = delete;

  std::filesystem::path path() const { return path_; }

 private:
  std::optional<TemporaryDirectory> directory_;
  std::filesystem::path path_;
};

}  // namespace bifocal::test
