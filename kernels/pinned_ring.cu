// A ring of pinned memory.
#include <algorithm>

#include "kernels/cuda_check.h"
#include "kernels/pinned_ring.h"

namespace bifocal {

PinnedRing::PinnedRing(cudaStream_t stream, std::size_t bytes) : stream_(stream), bytes_(bytes) {}

PinnedRing::~PinnedRing() {
  for (const Piece& piece : in_use_) {
    cudaEventSynchronize(piece.done);
    cudaEventDestroy(piece.done);
  }
  for (cudaEvent_t event : events_) {
    cudaEventDestroy(event);
  }
  if (memory_ != nullptr) {
    cudaFreeHost(memory_);
  }
}

std::byte* PinnedRing::take(std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  BIFOCAL_ASSERT(bytes > 0 && bytes <= largest_piece());
  if (memory_ == nullptr) {
    void* memory = nullptr;
    BIFOCAL_CUDA(cudaHostAlloc(&memory, bytes_, cudaHostAllocDefault));
    memory_ = static_cast<std::byte*>(memory);
  }
  const std::size_t room = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  taken_.begin = next_ + room <= bytes_ ? next_ : 0;
  taken_.end = std::min(taken_.begin + room, bytes_);
  const auto in_the_way = [&](const Piece& piece) {
    return piece.begin < taken_.end && taken_.begin < piece.end;
  };
  // The stream ends work in order, so that waiting for one piece frees all before it.
  while (std::any_of(in_use_.begin(), in_use_.end(), in_the_way)) {
    BIFOCAL_CUDA(cudaEventSynchronize(in_use_.front().done));
    events_.push_back(in_use_.front().done);
    in_use_.pop_front();
  }
  next_ = taken_.end;
  return memory_ + taken_.begin;
}

cudaEvent_t PinnedRing::mark() {
  taken_.done = new_event();
  BIFOCAL_CUDA(cudaEventRecord(taken_.done, stream_));
  in_use_.push_back(taken_);
  return taken_.done;
}

cudaEvent_t PinnedRing::new_event() {
  if (!events_.empty()) {
    cudaEvent_t event = events_.back();
    events_.pop_back();
    return event;
  }
  cudaEvent_t event = nullptr;
  BIFOCAL_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

}  // namespace bifocal
