// Communicators of ranks that compute on GPUs.
#pragma once

#include <memory>

#include "core/memory.h"
#include "kernels/cuda_stream.h"
#include "parallel/communicator.h"

namespace bifocal {

// The GPU of a rank, the local_rank-th of its host: GPU local_rank, or the only one that the rank
// sees (where a launcher hands each rank its own). Throws Error when GPUs are fewer than ranks.
// Call it before anything that makes a GPU current, and make_device_communicator to learn of ranks
// that share a GPU.
int choose_device(int local_rank);

// Collective over `host`, a communicator of host buffers. Tensors on the device travel by NCCL, on
// a stream of its own beside `compute`; others through `host`. A wait makes `compute` wait, not the
// CPU. A group of one copies on `compute` and needs no NCCL. Scratch comes from `memory`, whose
// tensors lie on the device of `compute`; both must outlive the result and what is split from it.
// Throws the same Error on every rank when NCCL is missing or ranks share a GPU.
std::unique_ptr<Communicator> make_device_communicator(CudaStream& compute,
                                                       Memory& memory,
                                                       std::unique_ptr<Communicator> host);

// Whether a kernel may read the pointer; null is not on the device.
bool is_on_device(const void* pointer);

}  // namespace bifocal
