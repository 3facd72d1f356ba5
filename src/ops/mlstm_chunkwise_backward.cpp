// The mLSTM's training path, backward: gradients of queries, keys, values and gates of each chunk
// from the states that enter it and the gradients of those that leave it.
#include <array>

#include "ops/mlstm_reverse.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

using GateRow = std::array<double, kMlstmChunkTokens>;

// Gradients of a chunk's log weights, by what the weight spans. The gradient of the log decay at
// token r sums all weights that decay through r; it is summed from these directly and never as a
// difference of larger sums, which would lose all digits where little survives a token.
struct LogWeightGradients {
  GateRow through{};  // token r: weights of tokens j < r read at t >= r
  GateRow written{};  // token j: weights read at any t >= j of this chunk
  GateRow read{};     // token t: reads of the entering state
  GateRow left{};     // token j: what leaves in the state after the chunk
  double passed = 0;  // the entering state's part of the state after the chunk
};

template <class T>
struct ChunkGradient {
  const MlstmBackward& op;
  const MlstmSizes& sizes;
  MlstmChunkView<T> chunk;
  MlstmReverseItem<T> item;
  std::int64_t state;
  const T* entering;  // X before the chunk, or null
  const T* leaving;   // gradient of X after the chunk, or null

  std::int64_t rows() const { return chunk.length * chunk.readers; }

  // k_j and v_j enter the state after the chunk with these weights.
  const T* write_weights() const { return item.decay + (chunk.length - 1) * chunk.length; }
};

template <class T>
struct Scratch {
  T *scores, *queries, *values, *d_values, *sums;

  static std::int64_t size(const MlstmSizes& s) {
    return kMlstmChunkTokens *
           (s.readers() * (kMlstmChunkTokens + s.head_dim) + 3 * (s.head_dim + 1));
  }

  Scratch(T* memory, const MlstmSizes& s)
      : scores(memory),
        queries(scores + kMlstmChunkTokens * s.readers() * kMlstmChunkTokens),
        values(queries + kMlstmChunkTokens * s.readers() * s.head_dim),
        d_values(values + kMlstmChunkTokens * (s.head_dim + 1)),
        sums(d_values + kMlstmChunkTokens * (s.head_dim + 1)) {}
};

// scores = D * (d_reads [v, 1]^T), the gradient of q k^T; also through and written.
template <class T>
void differentiate_weights(const ChunkGradient<T>& g,
                           const Scratch<T>& scratch,
                           LogWeightGradients& logs) {
  const MlstmChunkView<T>& chunk = g.chunk;
  gemm(Transpose::no,
       Transpose::yes,
       g.rows(),
       chunk.length,
       chunk.width,
       1,
       g.item.d_reads,
       chunk.width,
       g.item.values,
       chunk.width,
       0,
       scratch.scores,
       chunk.length);
  T* column = scratch.sums;  // over reads at t and later
  std::fill_n(column, chunk.length, T{0});
  for (std::int64_t t = chunk.length - 1; t >= 0; --t) {
    const T* decay = g.item.decay + t * chunk.length;
    for (std::int64_t row = t * chunk.readers; row < (t + 1) * chunk.readers; ++row) {
      T* scores = scratch.scores + row * chunk.length;
      const T* weights = g.item.weights + row * chunk.length;
      for (std::int64_t j = 0; j < chunk.length; ++j) {
        column[j] += weights[j] * scores[j];
        scores[j] *= decay[j];
      }
    }
    logs.through[static_cast<std::size_t>(t)] = static_cast<double>(row_sum(column, t));
  }
  std::copy_n(column, chunk.length, logs.written.begin());
}

// d_q = scores k + u (d_reads X^T).
template <class T>
void differentiate_queries(const ChunkGradient<T>& g,
                           const Scratch<T>& scratch,
                           LogWeightGradients& logs) {
  const MlstmChunkView<T>& chunk = g.chunk;
  if (g.entering != nullptr) {
    gemm(Transpose::no,
         Transpose::yes,
         g.rows(),
         chunk.dim,
         chunk.width,
         1,
         g.item.d_reads,
         chunk.width,
         g.entering,
         chunk.width,
         0,
         scratch.queries,
         chunk.dim);
    const std::int64_t row_size = chunk.readers * chunk.dim;
    for (std::int64_t t = 0; t < chunk.length; ++t) {
      T* d_q = scratch.queries + t * row_size;
      scale_row(d_q, g.item.carry[t], row_size);
      logs.read[static_cast<std::size_t>(t)] =
          static_cast<double>(dot(d_q, g.item.queries + t * row_size, row_size));
    }
  }
  gemm(Transpose::no,
       Transpose::no,
       g.rows(),
       chunk.dim,
       chunk.length,
       1,
       scratch.scores,
       chunk.length,
       chunk.k,
       chunk.k_stride,
       g.entering != nullptr ? 1 : 0,
       scratch.queries,
       chunk.dim);
  const MlstmReaderRows<T*> d_q(g.op.d_q.template as<T>(), g.sizes, chunk.begin, g.state);
  for (std::int64_t t = 0; t < chunk.length; ++t) {
    std::copy_n(scratch.queries + t * d_q.size, d_q.size, d_q.row(t));
  }
}

// d_k = scores^T q + (w [v, 1]) dX^T with dX the gradient of the leaving state.
template <class T>
void differentiate_keys(const ChunkGradient<T>& g,
                        const Scratch<T>& scratch,
                        LogWeightGradients& logs) {
  const MlstmChunkView<T>& chunk = g.chunk;
  T* d_k = g.op.d_k.template as<T>() + chunk.begin * chunk.k_stride + g.state * chunk.dim;
  if (g.leaving != nullptr) {
    chunk.pack_values(g.write_weights(), scratch.values);
    gemm(Transpose::no,
         Transpose::yes,
         chunk.length,
         chunk.dim,
         chunk.width,
         1,
         scratch.values,
         chunk.width,
         g.leaving,
         chunk.width,
         0,
         d_k,
         chunk.k_stride);
    for (std::int64_t j = 0; j < chunk.length; ++j) {
      const std::int64_t offset = j * chunk.k_stride;
      logs.left[static_cast<std::size_t>(j)] =
          static_cast<double>(dot(d_k + offset, chunk.k + offset, chunk.dim));
    }
  }
  gemm(Transpose::yes,
       Transpose::no,
       chunk.length,
       chunk.dim,
       g.rows(),
       1,
       scratch.scores,
       chunk.length,
       g.item.queries,
       chunk.dim,
       g.leaving != nullptr ? 1 : 0,
       d_k,
       chunk.k_stride);
}

// d_v = weights^T d_reads + w (k dX), summed over the states that hold this value head.
template <class T>
void differentiate_values(const ChunkGradient<T>& g, const Scratch<T>& scratch) {
  const MlstmChunkView<T>& chunk = g.chunk;
  const std::int64_t holders = g.sizes.holders();
  T* d_v = g.op.d_v.template as<T>() + chunk.begin * chunk.v_stride + g.state / holders * chunk.dim;
  gemm(Transpose::yes,
       Transpose::no,
       chunk.length,
       chunk.dim,
       g.rows(),
       1,
       g.item.weights,
       chunk.length,
       g.item.d_reads,
       chunk.width,
       g.state % holders == 0 ? 0 : 1,
       d_v,
       chunk.v_stride);
  if (g.leaving == nullptr) {
    return;
  }
  gemm(Transpose::no,
       Transpose::no,
       chunk.length,
       chunk.dim,
       chunk.dim,
       1,
       chunk.k,
       chunk.k_stride,
       g.leaving,
       chunk.width,
       0,
       scratch.d_values,
       chunk.dim);
  for (std::int64_t j = 0; j < chunk.length; ++j) {
    axpy(d_v + j * chunk.v_stride,
         g.write_weights()[j],
         scratch.d_values + j * chunk.dim,
         chunk.dim);
  }
}

template <class T>
void differentiate_gates(const ChunkGradient<T>& g, LogWeightGradients& logs) {
  const MlstmChunkView<T>& chunk = g.chunk;
  if (g.entering != nullptr && g.leaving != nullptr) {
    double sum = 0;
    for (std::int64_t i = 0; i < chunk.dim * chunk.width; ++i) {
      sum += static_cast<double>(g.entering[i]) * static_cast<double>(g.leaving[i]);
    }
    logs.passed = static_cast<double>(chunk.whole_carry()) * sum;
  }
  const std::int64_t states = g.sizes.states;
  const std::int64_t offset = chunk.begin * states + g.state;
  const T* f_gate = g.op.inputs.f_gate.template as<T>() + offset;
  T* d_i = g.op.d_i_gate.template as<T>() + offset;
  T* d_f = g.op.d_f_gate.template as<T>() + offset;
  GateRow read_later{};  // reads of the entering state at t and later
  double read = 0;
  for (std::int64_t t = chunk.length - 1; t >= 0; --t) {
    const auto at = static_cast<std::size_t>(t);
    read += logs.read[at];
    read_later[at] = read;
  }
  double left_earlier = 0;
  for (std::int64_t t = 0; t < chunk.length; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const double d_log_decay = logs.through[at] + read_later[at] + left_earlier + logs.passed;
    left_earlier += logs.left[at];
    d_i[t * states] = static_cast<T>(logs.written[at] + logs.left[at]);
    d_f[t * states] =
        static_cast<T>(sigmoid(-static_cast<double>(f_gate[t * states])) * d_log_decay);
  }
}

template <class T>
void backward(const MlstmBackward& op) {
  const MlstmProblem problem = prepare_mlstm(op.inputs);
  const MlstmSizes& sizes = problem.sizes;
  MlstmReverse<T> reverse(problem, op.h, op.d_h, static_cast<std::int64_t>(problem.chunks.size()));
  if (op.d_final_c) {
    reverse.set_final_gradient(op.d_final_c, op.d_final_n);
  }
  const std::int64_t scratch_size = Scratch<T>::size(sizes);
  const auto memory = make_scratch<T>(omp_get_max_threads() * scratch_size);
  const auto differentiate = [&](std::int64_t first, std::int64_t index, std::int64_t state) {
    const MlstmChunkView<T> chunk(
        problem, problem.chunks[static_cast<std::size_t>(first + index)], state);
    const ChunkGradient<T> gradient{
        .op = op,
        .sizes = sizes,
        .chunk = chunk,
        .item = reverse.item(index, state),
        .state = state,
        .entering = chunk.carries() ? reverse.entering(index, state) : nullptr,
        .leaving = reverse.has_leaving(first + index) ? reverse.leaving(index, state) : nullptr};
    const Scratch<T> scratch(memory.get() + omp_get_thread_num() * scratch_size, sizes);
    LogWeightGradients logs;
    differentiate_weights(gradient, scratch, logs);
    differentiate_queries(gradient, scratch, logs);
    differentiate_keys(gradient, scratch, logs);
    differentiate_values(gradient, scratch);
    differentiate_gates(gradient, logs);
  };
  const std::int64_t work = sizes.holders() * mlstm_chunk_work(sizes);
  reverse.run([&](std::int64_t first, std::int64_t count) {
    // All states of a value head on one thread: they add to the same rows of d_v.
    const std::int64_t items = count * sizes.v_heads;
#pragma omp parallel for schedule(static) if (worth_threads(items, work))
    for (std::int64_t i = 0; i < items; ++i) {
      const std::int64_t first_state = i % sizes.v_heads * sizes.holders();
      for (std::int64_t holder = 0; holder < sizes.holders(); ++holder) {
        differentiate(first, i / sizes.v_heads, first_state + holder);
      }
    }
  });
  if (op.d_initial_c) {
    const std::int64_t dim = sizes.head_dim;
    for (std::int64_t state = 0; state < sizes.states; ++state) {
      store_state(reverse.initial_gradient(state),
                  T{1},
                  dim,
                  op.d_initial_c.as<T>() + state * dim * dim,
                  op.d_initial_n.as<T>() + state * dim);
    }
  }
}

}  // namespace

void run(CpuStream& stream, const MlstmBackward& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tuple_cat(std::tie(o.d_q,
                                       o.d_k,
                                       o.d_v,
                                       o.d_i_gate,
                                       o.d_f_gate,
                                       o.d_initial_c,
                                       o.d_initial_n,
                                       o.d_h,
                                       o.h,
                                       o.d_final_c,
                                       o.d_final_n),
                              kMlstmTensors(o.inputs));
      })) {
    return;
  }
  dispatch_real("mlstm backward", op.d_q.dtype, [&](auto zero) { backward<decltype(zero)>(op); });
}

}  // namespace bifocal
