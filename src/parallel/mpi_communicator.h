// Communicator over MPI, host buffers. The library sees MPI here alone.
#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace bifocal {

// Initialises MPI when the process was started by an MPI launcher (or force is set) and finalises
// it in the destructor. MPI errors are returned and thrown as Error.
class MpiSession {
 public:
  MpiSession(int* argc, char*** argv, bool force = false);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  MpiSession(MpiSession&&) = delete;
  MpiSession& operator=(MpiSession&&) = delete;

  // All ranks; a group of one where no launcher started us. Collective.
  std::unique_ptr<Communicator> world() const;

  // Of all ranks; 0 of 1 where no launcher started us. Unlike world() no collective, so that a rank
  // may ask alone.
  int rank() const;
  int size() const;

  // Ends every rank of the job with this exit code. Does not return.
  [[noreturn]] void abort(int exit_code) const;

  bool active() const { return active_; }

 private:
  bool active_ = false;
};

// "Open MPI v4.1.4, ..." for --version.
std::string mpi_library_version();

}  // namespace bifocal
