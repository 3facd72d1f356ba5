// One chunk of one state, and the states between chunks: what the chunkwise mLSTM's forward and
// backward share.
// The normaliser travels as one more value column: values are [v, 1], a state is X = [C, n], the
// gradient of a read is [d_h / N, -d_h . h / N], and every product serves both at once.
#pragma once

#include <limits>
#include <memory>
#include <tuple>

#include <omp.h>

#include "ops/blas.h"
#include "ops/mlstm_gates.h"
#include "ops/vector_math.h"

namespace bifocal {

// Chunks whose states are held at once; bounds the scratch memory of long rows.
inline constexpr std::int64_t kMlstmBlockChunks = 8;

// Whether `items` of about `work` nanoseconds each pay for waking a team of threads.
inline bool worth_threads(std::int64_t items, std::int64_t work) {
  return items > 1 && items * work > 20000;
}

// About the nanoseconds of a chunk's products for one state.
inline std::int64_t mlstm_chunk_work(const MlstmSizes& sizes) {
  return 1 + kMlstmChunkTokens * sizes.readers() * (kMlstmChunkTokens + sizes.head_dim) *
                 sizes.head_dim / 16;
}

template <class T>
std::unique_ptr<T[]> make_scratch(std::int64_t size) {
  return std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(size));
}

// All tensors of floating point among the inputs, for run_widened().
inline constexpr auto kMlstmTensors = [](auto& inputs) {
  return std::tie(inputs.q,
                  inputs.k,
                  inputs.v,
                  inputs.i_gate,
                  inputs.f_gate,
                  inputs.initial.c,
                  inputs.initial.n,
                  inputs.initial.m);
};

// The inputs of one state in one chunk. length tokens, readers query heads, dim features and width
// = dim + 1 value columns. Rows of k, v and q lie stride elements apart.
template <class T>
struct MlstmChunkView {
  std::int64_t begin, length, readers, dim, width;
  const T* k;
  std::int64_t k_stride;
  const T* v;
  std::int64_t v_stride;
  const double* input;
  const double* decay_sum;
  const double* m;
  double m_before;

  MlstmChunkView(const MlstmProblem& problem, const MlstmChunk& chunk, std::int64_t state)
      : begin(chunk.begin),
        length(chunk.end - chunk.begin),
        readers(problem.sizes.readers()),
        dim(problem.sizes.head_dim),
        width(dim + 1),
        k_stride(problem.sizes.states * dim),
        v_stride(problem.sizes.v_heads * dim),
        m_before(problem.m_before(chunk, state)) {
    k = problem.inputs.k.as<T>() + begin * k_stride + state * dim;
    v = problem.inputs.v.as<T>() + begin * v_stride + state / problem.sizes.holders() * dim;
    const std::int64_t gate = state * problem.sizes.tokens + begin;
    input = problem.gates.input.data() + gate;
    decay_sum = problem.gates.decay_sum.data() + gate;
    m = problem.gates.m.data() + gate;
  }

  // Whether a state enters.
  bool carries() const { return m_before != -std::numeric_limits<double>::infinity(); }

  // exp(b_t + m_before - m_t): what the entering state keeps up to token t.
  T carry(std::int64_t t) const { return static_cast<T>(std::exp(decay_sum[t] + m_before - m[t])); }

  T whole_carry() const { return carry(length - 1); }

  // row[j] = exp(b_t - b_j + i_j - m_t) for j <= t, 0 beyond. The exponent is formed in double
  // before the exponential: exp(b_t) alone underflows.
  void decay_row(std::int64_t t, T* row) const {
    const double shift = decay_sum[t] - m[t];
    for (std::int64_t j = 0; j <= t; ++j) {
      row[j] = fast_exp(static_cast<T>(shift + (input[j] - decay_sum[j])));
    }
    std::fill(row + t + 1, row + length, T{0});
  }

  // [length, width]: row j is factor[j] (v_j, 1).
  void pack_values(const T* factor, T* out) const {
    for (std::int64_t j = 0; j < length; ++j) {
      const T* row = v + j * v_stride;
      for (std::int64_t i = 0; i < dim; ++i) {
        out[i] = factor[j] * row[i];
      }
      out[dim] = factor[j];
      out += width;
    }
  }

  void pack_values(T* out) const {
    for (std::int64_t j = 0; j < length; ++j) {
      std::copy_n(v + j * v_stride, dim, out);
      out[dim] = T{1};
      out += width;
    }
  }
};

// The rows of a [tokens, heads, head_dim] tensor that the readers of one state own in one chunk:
// readers * dim neighbouring numbers per token.
template <class Pointer>
struct MlstmReaderRows {
  Pointer data;
  std::int64_t stride, size;

  MlstmReaderRows(Pointer tensor, const MlstmSizes& sizes, std::int64_t begin, std::int64_t state)
      : data(tensor + (begin * sizes.heads + state * sizes.readers()) * sizes.head_dim),
        stride(sizes.heads * sizes.head_dim),
        size(sizes.readers() * sizes.head_dim) {}

  Pointer row(std::int64_t t) const { return data + t * stride; }
};

// Queries as one matrix [length * readers, dim]: all readers of a state share one product.
template <class T>
void pack_queries(const MlstmProblem& problem,
                  const MlstmChunkView<T>& chunk,
                  std::int64_t state,
                  T* out) {
  const MlstmReaderRows<const T*> q(
      problem.inputs.q.template as<T>(), problem.sizes, chunk.begin, state);
  for (std::int64_t t = 0; t < chunk.length; ++t) {
    std::copy_n(q.row(t), q.size, out + t * q.size);
  }
}

// X = factor [C, n].
template <class T>
void load_state(const T* c, const T* n, std::int64_t dim, T factor, T* x) {
  for (std::int64_t feature = 0; feature < dim; ++feature) {
    for (std::int64_t i = 0; i < dim; ++i) {
      x[i] = factor * c[feature * dim + i];
    }
    x[dim] = factor * n[feature];
    x += dim + 1;
  }
}

// [C, n] = factor X.
template <class T>
void store_state(const T* x, T factor, std::int64_t dim, T* c, T* n) {
  for (std::int64_t feature = 0; feature < dim; ++feature) {
    for (std::int64_t i = 0; i < dim; ++i) {
      c[feature * dim + i] = factor * x[i];
    }
    n[feature] = factor * x[dim];
    x += dim + 1;
  }
}

// States are stored with m rounded to T: the factor that brings C and n to that scale.
template <class T>
T scale_of_rounded_m(double m) {
  return m == -std::numeric_limits<double>::infinity()
             ? T{1}
             : static_cast<T>(std::exp(m - static_cast<double>(static_cast<T>(m))));
}

// The states that enter neighbouring chunks, computed a block of chunks at a time: local sums in
// parallel over chunks, then one scan. The arithmetic does not depend on where blocks begin.
template <class T>
class MlstmStates {
 public:
  // Starts at inputs.initial.
  explicit MlstmStates(const MlstmProblem& problem)
      : problem_(problem),
        dim_(problem.sizes.head_dim),
        size_(dim_ * (dim_ + 1)),
        x_(make_scratch<T>((kMlstmBlockChunks + 1) * problem.sizes.states * size_)),
        values_(make_scratch<T>(omp_get_max_threads() * values_size())) {
    if (!problem.inputs.initial) {
      std::fill_n(x_.get(), states() * size_, T{0});
      return;
    }
    const T* c = problem.inputs.initial.c.template as<T>();
    const T* n = problem.inputs.initial.n.template as<T>();
    for (std::int64_t state = 0; state < states(); ++state) {
      load_state(c + state * dim_ * dim_, n + state * dim_, dim_, T{1}, at(0, state));
    }
  }

  // X before chunk `index` of the block; index 0 is the state reached so far.
  T* at(std::int64_t index, std::int64_t state) const {
    return x_.get() + (index * states() + state) * size_;
  }

  // Numbers in the states at one index, of all states together.
  std::int64_t size() const { return states() * size_; }

  // Fills at(1) ... at(count) for chunks [first, first + count).
  void advance(std::int64_t first, std::int64_t count) {
    const std::int64_t items = count * states();
    const bool team = worth_threads(items, mlstm_chunk_work(problem_.sizes));
#pragma omp parallel for schedule(static) if (team)
    for (std::int64_t item = 0; item < items; ++item) {
      add_local(first, item / states(), item % states());
    }
#pragma omp parallel for schedule(static) if (worth_threads(states(), count * size_ / 4))
    for (std::int64_t state = 0; state < states(); ++state) {
      for (std::int64_t index = 0; index < count; ++index) {
        const MlstmChunkView<T> chunk(problem_, chunk_at(first + index), state);
        if (chunk.carries()) {
          axpy(at(index + 1, state), chunk.whole_carry(), at(index, state), size_);
        }
      }
    }
  }

  // Makes the state before chunk `index` of the block the one reached so far.
  void move_to(std::int64_t index) const {
    std::copy_n(at(index, 0), size(), at(0, 0));
  }

 private:
  std::int64_t states() const {
    return problem_.sizes.states;
  }

  const MlstmChunk& chunk_at(std::int64_t chunk) const {
    return problem_.chunks[static_cast<std::size_t>(chunk)];
  }

  std::int64_t values_size() const {
    return kMlstmChunkTokens * (dim_ + 2);
  }

  // The chunk's own tokens: k^T (weights [v, 1]) at the scale of its end.
  void add_local(std::int64_t first, std::int64_t index, std::int64_t state) const {
    const MlstmChunkView<T> chunk(problem_, chunk_at(first + index), state);
    T* weights = values_.get() + omp_get_thread_num() * values_size();
    T* values = weights + kMlstmChunkTokens;
    chunk.decay_row(chunk.length - 1, weights);
    chunk.pack_values(weights, values);
    gemm(Transpose::yes,
         Transpose::no,
         dim_,
         chunk.width,
         chunk.length,
         1,
         chunk.k,
         chunk.k_stride,
         values,
         chunk.width,
         0,
         at(index + 1, state),
         chunk.width);
  }

  const MlstmProblem& problem_;
  std::int64_t dim_, size_;
  std::unique_ptr<T[]> x_;
  std::unique_ptr<T[]> values_;
};

// Calls visit(first, count) for neighbouring blocks of the first `chunks` chunks, left to right.
template <class Visit>
void for_each_block(std::int64_t chunks, const Visit& visit) {
  for (std::int64_t first = 0; first < chunks; first += kMlstmBlockChunks) {
    visit(first, std::min(kMlstmBlockChunks, chunks - first));
  }
}

}  // namespace bifocal
