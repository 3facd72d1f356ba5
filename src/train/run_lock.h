// One job at a time in a run directory.
#pragma once

#include <filesystem>

#include "parallel/communicator.h"

namespace bifocal {

// Every rank of a job holds it, and the system takes it back from a rank that ends in whatever way.
// So a job cannot start beside another one, nor beside what a dying one has left.
class RunLock {
 public:
  // Makes `directory`/run.lock, which says who holds it. Waits up to `patience` seconds for ranks
  // that are ending, then throws the same Error on every rank. On file systems without locks there
  // is none. Collective; the ranks must see one directory, which exists.
  RunLock(const std::filesystem::path& directory, Communicator& group, double patience = 10.0);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace bifocal
