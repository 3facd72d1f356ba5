// Copies between host and device through pinned memory, and on the device. What counts as the
// device may lie in mapped host memory: CUDA finds out from the addresses.
#include <algorithm>
#include <cstring>

#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/pinned_ring.h"
#include "ops/transfer.h"

namespace bifocal {
namespace {

// A piece of a download on its way.
struct Arriving {
  const std::byte* from = nullptr;  // in the ring; null: none
  std::byte* to = nullptr;
  std::size_t bytes = 0;
  cudaEvent_t done = nullptr;

  void finish() {
    if (from != nullptr) {
      BIFOCAL_CUDA(cudaEventSynchronize(done));
      std::memcpy(to, from, bytes);
      from = nullptr;
    }
  }
};

bool is_pinned(const void* address) {
  cudaPointerAttributes attributes{};
  BIFOCAL_CUDA(cudaPointerGetAttributes(&attributes, address));
  return attributes.type == cudaMemoryTypeHost;
}

}  // namespace

void run(CudaStream& stream, const Upload& op) {
  PinnedRing& ring = stream.ring();
  const auto* from = static_cast<const std::byte*>(op.x.data);
  auto* to = static_cast<std::byte*>(op.y.data);
  for (std::size_t begin = 0; begin < op.y.bytes(); begin += ring.largest_piece()) {
    const std::size_t bytes = std::min(ring.largest_piece(), op.y.bytes() - begin);
    std::byte* piece = ring.take(bytes);
    std::memcpy(piece, from + begin, bytes);
    BIFOCAL_CUDA(cudaMemcpyAsync(to + begin, piece, bytes, cudaMemcpyDefault, stream.handle()));
    ring.mark();
  }
}

void run(CudaStream& stream, const Download& op) {
  PinnedRing& ring = stream.ring();
  const auto* from = static_cast<const std::byte*>(op.x.data);
  auto* to = static_cast<std::byte*>(op.y.data);
  if (op.y.bytes() > ring.largest_piece() && is_pinned(to)) {  // at the bus's speed, past the ring
    BIFOCAL_CUDA(cudaMemcpyAsync(to, from, op.y.bytes(), cudaMemcpyDefault, stream.handle()));
    BIFOCAL_CUDA(cudaStreamSynchronize(stream.handle()));
    return;
  }
  Arriving arriving;
  for (std::size_t begin = 0; begin < op.y.bytes(); begin += ring.largest_piece()) {
    const std::size_t bytes = std::min(ring.largest_piece(), op.y.bytes() - begin);
    std::byte* piece = ring.take(bytes);  // never the one that is arriving: two pieces do not meet
    BIFOCAL_CUDA(cudaMemcpyAsync(piece, from + begin, bytes, cudaMemcpyDefault, stream.handle()));
    const cudaEvent_t done = ring.mark();
    arriving.finish();  // while the next one is under way
    arriving = {piece, to + begin, bytes, done};
  }
  arriving.finish();
}

void run(CudaStream& stream, const Copy& op) {
  if (op.y.size() > 0) {
    BIFOCAL_CUDA(
        cudaMemcpyAsync(op.y.data, op.x.data, op.y.bytes(), cudaMemcpyDefault, stream.handle()));
  }
}

void run(CudaStream& stream, const CopyHeads& op) {
  const auto head_bytes = static_cast<std::size_t>(op.y.shape[2]) * size_of(op.y.dtype);
  const std::size_t bytes = static_cast<std::size_t>(op.count) * head_bytes;
  const auto tokens = static_cast<std::size_t>(op.y.shape[0]);
  if (bytes == 0 || tokens == 0) {
    return;
  }
  BIFOCAL_CUDA(cudaMemcpy2DAsync(
      static_cast<std::byte*>(op.y.data) + static_cast<std::size_t>(op.y_first) * head_bytes,
      static_cast<std::size_t>(op.y.shape[1]) * head_bytes,
      static_cast<const std::byte*>(op.x.data) + static_cast<std::size_t>(op.x_first) * head_bytes,
      static_cast<std::size_t>(op.x.shape[1]) * head_bytes,
      bytes,
      tokens,
      cudaMemcpyDefault,
      stream.handle()));
}

}  // namespace bifocal
