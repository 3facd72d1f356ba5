// The ranks of a running MPI test. tests/support/mpi_main.cpp sets it before the tests run.
#pragma once

#include "parallel/communicator.h"

namespace bifocal {

// All ranks of the job; valid inside tests only.
Communicator& test_world();

}  // namespace bifocal
