// Where sequences stand: a few numbers a row. Plain launches, so that kernels after them may read
// weights before they wait (kernels/dependent.cuh).
#include <algorithm>

#include "kernels/launch.cuh"
#include "ops/decode_layer.h"
#include "ops/decode_state.h"

namespace bifocal {
namespace {

struct BeginArgs {
  std::int32_t *ids, *positions;
  std::int64_t *streams, *indices;
  const std::int32_t* token;
  std::int32_t* position;
  const std::int64_t* stream;
  std::int64_t* drawn;
  const std::int32_t* sequences;
  int rows;
};

__global__ void __launch_bounds__(kBlockThreads) begin_kernel(BeginArgs a) {
  for (int row = static_cast<int>(threadIdx.x); row < a.rows; row += kBlockThreads) {
    const int sequence = a.sequences[row];
    a.ids[row] = a.token[sequence];
    a.positions[row] = a.position[sequence]++;
    a.streams[row] = a.stream[sequence];
    a.indices[row] = a.drawn[sequence]++;
  }
}

__global__ void __launch_bounds__(kBlockThreads) end_kernel(std::int32_t* token,
                                                            const std::int32_t* ids,
                                                            const std::int32_t* sequences,
                                                            int rows) {
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kBlockThreads) {
    token[sequences[row]] = ids[row];
  }
}

__global__ void __launch_bounds__(kBlockThreads) places_kernel(std::int32_t* places,
                                                               std::int32_t* lengths,
                                                               const std::int32_t* positions,
                                                               int rows,
                                                               int window,
                                                               int pinned) {
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kBlockThreads) {
    const int token = positions[row];
    const bool stays = window == 0 || token < pinned;
    places[row] = stays ? token : pinned + (token - pinned) % window;
    lengths[row] = window == 0 ? token + 1 : min(token + 1, window + pinned);
  }
}

template <class T, class W>
__global__ void __launch_bounds__(kBlockThreads)
    table_kernel(T* y, const std::int32_t* ids, const W* table, std::int64_t known, int width) {
  const std::int64_t row = blockIdx.y;
  const int column = static_cast<int>(blockIdx.x) * kBlockThreads + static_cast<int>(threadIdx.x);
  const std::int64_t id = ids[row];
  if (column < width) {
    const bool there = id >= 0 && id < known;
    y[row * width + column] =
        store_as<T>(there ? load_float(table[id * width + column]) : __int_as_float(0x7fc00000));
  }
}

}  // namespace

void run(CudaStream& stream, const StepBegin& op) {
  const BeginArgs args{.ids = op.ids.as<std::int32_t>(),
                       .positions = op.positions.as<std::int32_t>(),
                       .streams = op.streams.as<std::int64_t>(),
                       .indices = op.indices.as<std::int64_t>(),
                       .token = op.state.token.as<std::int32_t>(),
                       .position = op.state.position.as<std::int32_t>(),
                       .stream = op.state.stream.as<std::int64_t>(),
                       .drawn = op.state.drawn.as<std::int64_t>(),
                       .sequences = op.sequences.as<std::int32_t>(),
                       .rows = static_cast<int>(op.sequences.size())};
  begin_kernel<<<1, kBlockThreads, 0, stream.handle()>>>(args);
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const StepEnd& op) {
  end_kernel<<<1, kBlockThreads, 0, stream.handle()>>>(op.token.as<std::int32_t>(),
                                                       op.ids.as<std::int32_t>(),
                                                       op.sequences.as<std::int32_t>(),
                                                       static_cast<int>(op.ids.size()));
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const CachePlaces& op) {
  places_kernel<<<1, kBlockThreads, 0, stream.handle()>>>(op.places.as<std::int32_t>(),
                                                          op.lengths.as<std::int32_t>(),
                                                          op.positions.as<std::int32_t>(),
                                                          static_cast<int>(op.positions.size()),
                                                          static_cast<int>(op.window),
                                                          static_cast<int>(op.pinned));
  BIFOCAL_CUDA(cudaGetLastError());
}

void run(CudaStream& stream, const DecodeEmbedding& op) {
  const std::int64_t rows = op.ids.size();
  const std::int64_t width = op.table.shape[1];
  constexpr std::int64_t kMostRows = 65535;  // of grid.y
  dispatch_device("decode_embedding", op.y.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto stored) {
      using W = decltype(stored);
      for (std::int64_t first = 0; first < rows; first += kMostRows) {
        const dim3 grid(static_cast<unsigned>(ceil_div(width, kBlockThreads)),
                        static_cast<unsigned>(std::min(kMostRows, rows - first)));
        table_kernel<T, W>
            <<<grid, kBlockThreads, 0, stream.handle()>>>(op.y.as<T>() + first * width,
                                                          op.ids.as<std::int32_t>() + first,
                                                          op.table.as<W>(),
                                                          op.table.shape[0],
                                                          static_cast<int>(width));
        BIFOCAL_CUDA(cudaGetLastError());
      }
    };
    if (op.table.dtype == DType::bf16) {
      launch(BFloat16{});
    } else {
      launch(zero);
    }
  });
}

}  // namespace bifocal
