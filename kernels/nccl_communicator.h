// Communicator over NCCL for tensors on the device, over another one for tensors on the host.
#pragma once

#include <memory>

#include "core/memory.h"
#include "kernels/cuda_stream.h"
#include "parallel/communicator.h"

namespace bifocal {

// As make_device_communicator, for a group of several ranks. Sums on the device are in rank order
// where all_reduce_sum gathers (at most 1 MiB in all, and bfloat16), where reduce_scatter widens,
// and among two ranks; else NCCL's order, which hangs on the machine and the size alone.
std::unique_ptr<Communicator> make_nccl_communicator(CudaStream& compute,
                                                     Memory& memory,
                                                     std::unique_ptr<Communicator> host);

}  // namespace bifocal
