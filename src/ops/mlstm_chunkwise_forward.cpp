// The mLSTM's training path, forward: products inside chunks, one state between them.
#include "ops/mlstm_chunk.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

// Scratch of one thread, sized for a whole chunk.
template <class T>
struct ReadScratch {
  T *queries, *values, *decay, *scores, *sums;

  static std::int64_t size(const MlstmSizes& s) {
    const std::int64_t rows = kMlstmChunkTokens * s.readers();
    return rows * (2 * s.head_dim + 1 + kMlstmChunkTokens) + kMlstmChunkTokens * (s.head_dim + 2);
  }

  ReadScratch(T* memory, const MlstmSizes& s)
      : queries(memory),
        values(queries + kMlstmChunkTokens * s.readers() * s.head_dim),
        decay(values + kMlstmChunkTokens * (s.head_dim + 1)),
        scores(decay + kMlstmChunkTokens),
        sums(scores + kMlstmChunkTokens * s.readers() * kMlstmChunkTokens) {}
};

// h_t = ((D * q k^T) [v, 1] + u q X) split into numerator and normaliser.
template <class T>
void read_chunk(const MlstmForward& op,
                const MlstmProblem& problem,
                const MlstmChunk& place,
                std::int64_t state,
                const T* x,
                const ReadScratch<T>& scratch) {
  const MlstmChunkView<T> chunk(problem, place, state);
  const std::int64_t rows = chunk.length * chunk.readers;
  pack_queries(problem, chunk, state, scratch.queries);
  chunk.pack_values(scratch.values);
  gemm(Transpose::no,
       Transpose::yes,
       rows,
       chunk.length,
       chunk.dim,
       1,
       scratch.queries,
       chunk.dim,
       chunk.k,
       chunk.k_stride,
       0,
       scratch.scores,
       chunk.length);
  if (chunk.carries()) {
    gemm(Transpose::no,
         Transpose::no,
         rows,
         chunk.width,
         chunk.dim,
         1,
         scratch.queries,
         chunk.dim,
         x,
         chunk.width,
         0,
         scratch.sums,
         chunk.width);
  }
  for (std::int64_t t = 0; t < chunk.length; ++t) {
    chunk.decay_row(t, scratch.decay);
    for (std::int64_t row = t * chunk.readers; row < (t + 1) * chunk.readers; ++row) {
      T* scores = scratch.scores + row * chunk.length;
      for (std::int64_t j = 0; j < chunk.length; ++j) {
        scores[j] *= scratch.decay[j];
      }
    }
    if (chunk.carries()) {
      scale_row(scratch.sums + t * chunk.readers * chunk.width,
                chunk.carry(t),
                chunk.readers * chunk.width);
    }
  }
  gemm(Transpose::no,
       Transpose::no,
       rows,
       chunk.width,
       chunk.length,
       1,
       scratch.scores,
       chunk.length,
       scratch.values,
       chunk.width,
       chunk.carries() ? 1 : 0,
       scratch.sums,
       chunk.width);
  const MlstmReaderRows<T*> h(op.h.as<T>(), problem.sizes, chunk.begin, state);
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* sums = scratch.sums + row * chunk.width;
    T* out = h.row(row / chunk.readers) + row % chunk.readers * chunk.dim;
    const T factor = T{1} / (sums[chunk.dim] + static_cast<T>(kMlstmTiny));
    for (std::int64_t i = 0; i < chunk.dim; ++i) {
      out[i] = sums[i] * factor;
    }
  }
}

template <class T>
void store_final(const MlstmState& final, const MlstmProblem& problem, const T* x) {
  const std::int64_t dim = problem.sizes.head_dim;
  for (std::int64_t state = 0; state < problem.sizes.states; ++state) {
    const double m = problem.m_after(state);
    store_state(x + state * dim * (dim + 1),
                scale_of_rounded_m<T>(m),
                dim,
                final.c.as<T>() + state * dim * dim,
                final.n.as<T>() + state * dim);
    final.m.as<T>()[state] = static_cast<T>(m);
  }
}

template <class T>
void forward(const MlstmForward& op) {
  const MlstmProblem problem = prepare_mlstm(op.inputs);
  const std::int64_t states = problem.sizes.states;
  MlstmStates<T> entering(problem);
  const std::int64_t scratch_size = ReadScratch<T>::size(problem.sizes);
  const auto memory = make_scratch<T>(omp_get_max_threads() * scratch_size);
  const auto chunks = static_cast<std::int64_t>(problem.chunks.size());
  const std::int64_t work = mlstm_chunk_work(problem.sizes);
  for_each_block(chunks, [&](std::int64_t first, std::int64_t count) {
    entering.advance(first, count);
    const std::int64_t items = count * states;
#pragma omp parallel for schedule(static) if (worth_threads(items, work))
    for (std::int64_t item = 0; item < items; ++item) {
      const std::int64_t index = item / states;
      const std::int64_t state = item % states;
      const ReadScratch<T> scratch(memory.get() + omp_get_thread_num() * scratch_size,
                                   problem.sizes);
      read_chunk(op,
                 problem,
                 problem.chunks[static_cast<std::size_t>(first + index)],
                 state,
                 entering.at(index, state),
                 scratch);
    }
    entering.move_to(count);
  });
  if (op.final) {
    store_final(op.final, problem, entering.at(0, 0));
  }
}

}  // namespace

void run(CpuStream& stream, const MlstmForward& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tuple_cat(std::tie(o.h, o.final.c, o.final.n, o.final.m),
                              kMlstmTensors(o.inputs));
      })) {
    return;
  }
  dispatch_real("mlstm", op.h.dtype, [&](auto zero) { forward<decltype(zero)>(op); });
}

}  // namespace bifocal
