// Pinned host memory on the way between host and device.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include <cuda_runtime.h>

namespace bifocal {

// Pieces are taken one after the other around a ring. A piece is free again when the stream's work
// on it is done; the host waits only where the ring is full. Pinned at the first piece.
class PinnedRing {
 public:
  // The stream must outlive the ring.
  explicit PinnedRing(cudaStream_t stream, std::size_t bytes = std::size_t{64} << 20);
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // The largest piece. Two of them never meet.
  std::size_t largest_piece() const { return bytes_ / 4; }

  // A piece that no queued work uses. Ends with mark().
  std::byte* take(std::size_t bytes);

  // All work on the piece taken last is queued. The event that tells its end is valid until two
  // further pieces were taken.
  cudaEvent_t mark();

 private:
  struct Piece {
    std::size_t begin = 0;
    std::size_t end = 0;
    cudaEvent_t done = nullptr;
  };

  cudaEvent_t new_event();

  cudaStream_t stream_;
  std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::size_t next_ = 0;
  Piece taken_;
  std::deque<Piece> in_use_;
  std::vector<cudaEvent_t> events_;  // not in use
};

}  // namespace bifocal
