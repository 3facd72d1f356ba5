// The chunkwise mLSTM from right to left: normalised gradients of the reads and the scan of state
// gradients, a block of chunks at a time. States are recomputed from the one saved before each
// block.
#pragma once

#include "ops/mlstm_chunk.h"

namespace bifocal {

// What one state's share of one chunk keeps between the scan and the gradients of its inputs.
// rows = length * readers, row t * readers + r.
template <class T>
struct MlstmReverseItem {
  T* queries;  // [rows, dim]
  T* values;   // [length, width]: [v, 1]
  T* decay;    // [length, length]: D_tj = exp(b_t - b_j + i_j - m_t)
  T* weights;  // [rows, length]: D * q k^T
  T* d_reads;  // [rows, width]: [d_h / N, -d_h . h / N]
  T* carry;    // [length]: u_t = exp(b_t + m_before - m_t)

  static std::int64_t size(const MlstmSizes& s) {
    constexpr std::int64_t kLength = kMlstmChunkTokens;
    return kLength * (s.readers() * (2 * s.head_dim + 1 + kLength) + s.head_dim + 2 + kLength);
  }

  MlstmReverseItem(T* memory, const MlstmSizes& s)
      : queries(memory),
        values(queries + kMlstmChunkTokens * s.readers() * s.head_dim),
        decay(values + kMlstmChunkTokens * (s.head_dim + 1)),
        weights(decay + kMlstmChunkTokens * kMlstmChunkTokens),
        d_reads(weights + kMlstmChunkTokens * s.readers() * kMlstmChunkTokens),
        carry(d_reads + kMlstmChunkTokens * s.readers() * (s.head_dim + 1)) {}
};

template <class T>
class MlstmReverse {
 public:
  // Walks the first `chunks` chunks.
  MlstmReverse(const MlstmProblem& problem,
               const ConstTensorView& h,
               const ConstTensorView& d_h,
               std::int64_t chunks)
      : problem_(problem),
        h_(h.as<T>()),
        d_h_(d_h.as<T>()),
        chunks_(chunks),
        last_count_(chunks == 0 ? 0 : (chunks - 1) % kMlstmBlockChunks + 1),
        size_(problem.sizes.head_dim * (problem.sizes.head_dim + 1)),
        entering_(problem),
        d_x_(make_scratch<T>((kMlstmBlockChunks + 1) * states() * size_)),
        item_size_(MlstmReverseItem<T>::size(problem.sizes)),
        items_(make_scratch<T>(kMlstmBlockChunks * states() * item_size_)),
        scratch_(make_scratch<T>(omp_get_max_threads() * scratch_size())) {
    std::fill_n(d_at(last_count_, 0), states() * size_, T{0});
  }

  // Gradient of the state after the last chunk, at the scale of that state as it was stored.
  void set_final_gradient(const ConstTensorView& d_c, const ConstTensorView& d_n) {
    const std::int64_t dim = problem_.sizes.head_dim;
    for (std::int64_t state = 0; state < states(); ++state) {
      load_state(d_c.as<T>() + state * dim * dim,
                 d_n.as<T>() + state * dim,
                 dim,
                 scale_of_rounded_m<T>(problem_.m_after(state)),
                 d_at(last_count_, state));
    }
    has_final_gradient_ = true;
  }

  // Gradient of the state before the first chunk, after run.
  const T* initial_gradient(std::int64_t state) const { return d_at(0, state); }

  // Calls visit(first, count) for blocks of chunks from right to left; item, entering and leaving
  // then hold that block.
  template <class Visit>
  void run(const Visit& visit) {
    const std::int64_t blocks = (chunks_ + kMlstmBlockChunks - 1) / kMlstmBlockChunks;
    const auto saved = make_scratch<T>(blocks * entering_.size());
    for_each_block(chunks_, [&](std::int64_t first, std::int64_t count) {
      std::copy_n(entering_.at(0, 0),
                  entering_.size(),
                  saved.get() + first / kMlstmBlockChunks * entering_.size());
      if (first + count < chunks_) {
        entering_.advance(first, count);
        entering_.move_to(count);
      }
    });
    for (std::int64_t block = blocks - 1; block >= 0; --block) {
      const std::int64_t first = block * kMlstmBlockChunks;
      const std::int64_t count = std::min(kMlstmBlockChunks, chunks_ - first);
      if (block < blocks - 1) {
        std::copy_n(d_at(0, 0), states() * size_, d_at(count, 0));
      }
      std::copy_n(saved.get() + block * entering_.size(), entering_.size(), entering_.at(0, 0));
      entering_.advance(first, count);
      const std::int64_t items = count * states();
      const bool team = worth_threads(items, mlstm_chunk_work(problem_.sizes));
#pragma omp parallel for schedule(static) if (team)
      for (std::int64_t i = 0; i < items; ++i) {
        differentiate_reads(first, i / states(), i % states());
      }
      scan(first, count);
      visit(first, count);
    }
  }

  MlstmReverseItem<T> item(std::int64_t index, std::int64_t state) const {
    return {items_.get() + (index * states() + state) * item_size_, problem_.sizes};
  }

  // X before chunk `index` of the block.
  const T* entering(std::int64_t index, std::int64_t state) const {
    return entering_.at(index, state);
  }

  // Gradient of X after chunk `index` of the block.
  const T* leaving(std::int64_t index, std::int64_t state) const {
    return d_at(index + 1, state);
  }

  // Whether leaving can differ from 0 for this chunk of the row.
  bool has_leaving(std::int64_t chunk) const {
    return chunk + 1 < chunks_ ? !chunk_at(chunk + 1).opens_document : has_final_gradient_;
  }

 private:
  std::int64_t states() const {
    return problem_.sizes.states;
  }

  const MlstmChunk& chunk_at(std::int64_t chunk) const {
    return problem_.chunks[static_cast<std::size_t>(chunk)];
  }

  T* d_at(std::int64_t index, std::int64_t state) const {
    return d_x_.get() + (index * states() + state) * size_;
  }

  std::int64_t scratch_size() const {
    return kMlstmChunkTokens * problem_.sizes.readers() * (problem_.sizes.head_dim + 1);
  }

  // Fills the item and the chunk's own part of d_at(index): q^T (u d_reads).
  void differentiate_reads(std::int64_t first, std::int64_t index, std::int64_t state) const {
    const MlstmChunkView<T> chunk(problem_, chunk_at(first + index), state);
    const MlstmReverseItem<T> out = item(index, state);
    const std::int64_t rows = chunk.length * chunk.readers;
    pack_queries(problem_, chunk, state, out.queries);
    chunk.pack_values(out.values);
    gemm(Transpose::no,
         Transpose::yes,
         rows,
         chunk.length,
         chunk.dim,
         1,
         out.queries,
         chunk.dim,
         chunk.k,
         chunk.k_stride,
         0,
         out.weights,
         chunk.length);
    T* scratch = scratch_.get() + omp_get_thread_num() * scratch_size();
    for (std::int64_t feature = 0; feature < chunk.dim; ++feature) {
      scratch[feature] = entering_.at(index, state)[feature * chunk.width + chunk.dim];
    }
    for (std::int64_t t = 0; t < chunk.length; ++t) {
      T* decay = out.decay + t * chunk.length;
      chunk.decay_row(t, decay);
      out.carry[t] = chunk.carry(t);
      for (std::int64_t reader = 0; reader < chunk.readers; ++reader) {
        const std::int64_t row = t * chunk.readers + reader;
        T* weights = out.weights + row * chunk.length;
        T normaliser = static_cast<T>(kMlstmTiny);
        for (std::int64_t j = 0; j <= t; ++j) {
          weights[j] *= decay[j];
        }
        std::fill(weights + t + 1, weights + chunk.length, T{0});
        normaliser += row_sum(weights, t + 1);
        if (chunk.carries()) {
          normaliser += out.carry[t] * dot(out.queries + row * chunk.dim, scratch, chunk.dim);
        }
        differentiate_read(chunk, state, row, normaliser, out.d_reads + row * chunk.width);
      }
    }
    if (chunk.carries()) {
      add_local_gradient(chunk, out, scratch, d_at(index, state));
    }
  }

  // The normaliser depends on the weights too: its gradient is the last column.
  void differentiate_read(const MlstmChunkView<T>& chunk,
                          std::int64_t state,
                          std::int64_t row,
                          T normaliser,
                          T* out) const {
    const std::int64_t t = row / chunk.readers;
    const std::int64_t offset = row % chunk.readers * chunk.dim;
    const MlstmReaderRows<const T*> h(h_, problem_.sizes, chunk.begin, state);
    const MlstmReaderRows<const T*> d_h(d_h_, problem_.sizes, chunk.begin, state);
    const T* d_h_row = d_h.row(t) + offset;
    const T factor = T{1} / normaliser;
    for (std::int64_t i = 0; i < chunk.dim; ++i) {
      out[i] = factor * d_h_row[i];
    }
    out[chunk.dim] = -dot(out, h.row(t) + offset, chunk.dim);
  }

  static void add_local_gradient(const MlstmChunkView<T>& chunk,
                                 const MlstmReverseItem<T>& in,
                                 T* scratch,
                                 T* out) {
    const std::int64_t rows = chunk.length * chunk.readers;
    for (std::int64_t row = 0; row < rows; ++row) {
      const T carry = in.carry[row / chunk.readers];
      for (std::int64_t i = row * chunk.width; i < (row + 1) * chunk.width; ++i) {
        scratch[i] = carry * in.d_reads[i];
      }
    }
    gemm(Transpose::yes,
         Transpose::no,
         chunk.dim,
         chunk.width,
         rows,
         1,
         in.queries,
         chunk.dim,
         scratch,
         chunk.width,
         0,
         out,
         chunk.width);
  }

  // Right to left: the gradient of a state gathers what later chunks read of it.
  void scan(std::int64_t first, std::int64_t count) const {
#pragma omp parallel for schedule(static) if (worth_threads(states(), count * size_ / 4))
    for (std::int64_t state = 0; state < states(); ++state) {
      for (std::int64_t index = count - 1; index >= 0; --index) {
        const MlstmChunkView<T> chunk(problem_, chunk_at(first + index), state);
        if (chunk.carries()) {
          axpy(d_at(index, state), chunk.whole_carry(), d_at(index + 1, state), size_);
        } else {
          std::fill_n(d_at(index, state), size_, T{0});
        }
      }
    }
  }

  const MlstmProblem& problem_;
  const T* h_;
  const T* d_h_;
  std::int64_t chunks_, last_count_, size_;
  MlstmStates<T> entering_;
  std::unique_ptr<T[]> d_x_;
  std::int64_t item_size_;
  std::unique_ptr<T[]> items_;
  std::unique_ptr<T[]> scratch_;
  bool has_final_gradient_ = false;
};

}  // namespace bifocal
