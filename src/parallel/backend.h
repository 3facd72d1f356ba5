// What a rank computes on: the CPU or one GPU. Its stream, its memory, and groups of ranks that
// move tensors of both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/memory.h"
#include "core/stream.h"
#include "parallel/communicator.h"

namespace bifocal {

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  Backend(Backend&&) = delete;
  Backend& operator=(Backend&&) = delete;
  // After every tensor, communicator and stream user.
  virtual ~Backend() = default;

  virtual Stream& stream() = 0;
  virtual Memory& memory() = 0;

  // Bytes that tensors to come may take. On a CPU without a limit 0: not known.
  virtual std::size_t free_bytes() const = 0;

  // Memory on the host that the stream's ops can read and write in place: on a GPU pinned, and as
  // fast as the bus.
  virtual Memory& host_memory() = 0;

  // The group of `host`, for tensors on the host and on the backend's device. On a device an
  // operation takes its place in the stream's order, and waiting for it makes the stream wait, not
  // the host. Collective.
  virtual std::unique_ptr<Communicator> communicator(std::unique_ptr<Communicator> host) = 0;
};

// limit_bytes: most bytes of tensors, 0 for no limit.
std::unique_ptr<Backend> make_cpu_backend(std::size_t limit_bytes);

// Which kernels a GPU runs.
enum class Kernels : std::uint8_t {
  automatic,  // those made for the device where there are any
  portable    // those for every device: compute capability 8.x and 9.0
};

// The GPU whose index is this rank's among the ranks of its host. limit_bytes: most device memory
// for tensors and scratch, as if the card had no more; 0: what is there. Throws Error in builds
// without CUDA, where the host has no such GPU, and for GPUs of a compute capability other than 8.x
// and 9.0.
std::unique_ptr<Backend> make_cuda_backend(int local_rank,
                                           std::size_t limit_bytes,
                                           Kernels kernels = Kernels::automatic);

// What make_cuda_backend() returns in builds with CUDA (kernels/cuda_backend.cu).
std::unique_ptr<Backend> open_cuda_backend(int local_rank,
                                           std::size_t limit_bytes,
                                           Kernels kernels);

}  // namespace bifocal
