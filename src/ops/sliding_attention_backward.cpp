// Sliding attention, backward: probabilities are made again from the saved lse, tile by tile.
//
// With z the logits, P = exp(z - lse), dP = d_out v, delta = d_out . out (which holds for any share
// of the sink, since the sink has no value) and dz = P (dP - delta):
//   d_v += P^T d_out,   d_k += dz^T q scale,   d_q += scale dz k.
// No two tasks that run at once share a row of any gradient, and the order in which a row takes its
// sums does not depend on the number of threads, so neither do the bits.
#include <algorithm>
#include <vector>

#include <omp.h>

#include "ops/attention_tile.h"
#include "ops/blas.h"
#include "ops/sliding_attention.h"
#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "sliding_attention_backward";

// A thread's scratch for one block. rows = kQueryBlock * group, in the order [token, group].
template <class T>
struct BackwardScratch {
  std::vector<T> q;            // [rows, head_dim], scaled
  std::vector<T> d_out;        // [rows, head_dim]
  std::vector<T> d_q;          // [rows, head_dim], of one tile
  std::vector<T> probability;  // [rows, kKeyTile]
  std::vector<T> d_logit;      // [rows, kKeyTile]

  explicit BackwardScratch(const AttentionArrays<T>& a) {
    const auto rows = static_cast<std::size_t>(kQueryBlock * a.group);
    q.resize(rows * static_cast<std::size_t>(a.dim));
    d_out.resize(q.size());
    d_q.resize(q.size());
    probability.resize(rows * kKeyTile);
    d_logit.resize(probability.size());
  }
};

// One of the two buffers of keys with its gradients, at one key-value head.
template <class T>
struct KeySide {
  const T *k, *v;
  T *d_k, *d_v;
};

template <class T>
struct BackwardArrays {
  AttentionArrays<T> in;
  const T *d_out, *lse;
  const T* delta;  // [tokens, heads]
  T* d_q;
  KeySide<T> window, pinned;

  KeySide<T> window_of(std::int64_t g) const { return at_head(window, g * in.dim); }

  KeySide<T> pinned_of(std::int64_t g) const { return at_head(pinned, g * in.dim); }

 private:
  static KeySide<T> at_head(const KeySide<T>& side, std::int64_t offset) {
    return {side.k + offset, side.v + offset, side.d_k + offset, side.d_v + offset};
  }
};

// Logits become P and dP becomes dz; masked entries become 0 in both and are never read.
template <class T>
void differentiate_softmax(const BackwardArrays<T>& a,
                           const QueryBlock& block,
                           const KeyTile& tile,
                           BackwardScratch<T>& scratch) {
  const std::int64_t group = a.in.group;
  for (std::int64_t i = tile.query_begin; i < tile.query_end; ++i) {
    const std::int64_t begin = tile.key_begin[static_cast<std::size_t>(i)];
    const std::int64_t end = tile.key_end[static_cast<std::size_t>(i)];
    for (std::int64_t r = 0; r < group; ++r) {
      const std::int64_t at = (block.begin + i) * a.in.heads + block.kv_head * group + r;
      const T lse = a.lse[at];
      const T delta = a.delta[at];
      T* p = scratch.probability.data() + (i * group + r) * kKeyTile;
      T* dz = scratch.d_logit.data() + (i * group + r) * kKeyTile;
      for (T* x : {p, dz}) {
        std::fill(x, x + begin, T{0});
        std::fill(x + end, x + tile.count, T{0});
      }
#pragma omp simd
      for (std::int64_t j = begin; j < end; ++j) {
        p[j] = fast_exp(p[j] - lse);
        dz[j] = p[j] * (dz[j] - delta);
      }
    }
  }
}

// a [rows, head_dim] times the tile's keys or values transposed: [rows, kKeyTile].
template <class T>
void times_keys(
    const AttentionArrays<T>& a, const KeyTile& tile, const T* rows, const T* keys, T* result) {
  const std::int64_t first = tile.query_begin * a.group;
  gemm(Transpose::no,
       Transpose::yes,
       tile.query_end * a.group - first,
       tile.count,
       a.dim,
       1,
       rows + first * a.dim,
       a.dim,
       keys + tile.first * a.key_stride(),
       a.key_stride(),
       0,
       result + first * kKeyTile,
       kKeyTile);
}

// d_keys += weights^T rows, with weights [rows, kKeyTile] and rows [rows, head_dim].
template <class T>
void add_to_keys(
    const AttentionArrays<T>& a, const KeyTile& tile, const T* weights, const T* rows, T* d_keys) {
  const std::int64_t first = tile.query_begin * a.group;
  gemm(Transpose::yes,
       Transpose::no,
       tile.count,
       a.dim,
       tile.query_end * a.group - first,
       1,
       weights + first * kKeyTile,
       kKeyTile,
       rows + first * a.dim,
       a.dim,
       1,
       d_keys + tile.first * a.key_stride(),
       a.key_stride());
}

// Adds scale * dz k to d_q.
template <class T>
void add_to_queries(const BackwardArrays<T>& a,
                    const QueryBlock& block,
                    const KeyTile& tile,
                    const T* k,
                    BackwardScratch<T>& scratch) {
  const std::int64_t first = tile.query_begin * a.in.group;
  gemm(Transpose::no,
       Transpose::no,
       tile.query_end * a.in.group - first,
       a.in.dim,
       tile.count,
       a.in.scale,
       scratch.d_logit.data() + first * kKeyTile,
       kKeyTile,
       k + tile.first * a.in.key_stride(),
       a.in.key_stride(),
       0,
       scratch.d_q.data(),
       a.in.dim);
  const std::int64_t size = a.in.group * a.in.dim;
  for (std::int64_t i = tile.query_begin; i < tile.query_end; ++i) {
    axpy(a.d_q + ((block.begin + i) * a.in.heads + block.kv_head * a.in.group) * a.in.dim,
         T{1},
         scratch.d_q.data() + (i - tile.query_begin) * size,
         size);
  }
}

template <class T>
void differentiate_tile(const BackwardArrays<T>& a,
                        const QueryBlock& block,
                        const KeyTile& tile,
                        const KeySide<T>& side,
                        BackwardScratch<T>& scratch) {
  gather_block(a.in, block, a.in.q, a.in.scale, scratch.q.data());
  gather_block(a.in, block, a.d_out, T{1}, scratch.d_out.data());
  times_keys(a.in, tile, scratch.q.data(), side.k, scratch.probability.data());
  times_keys(a.in, tile, scratch.d_out.data(), side.v, scratch.d_logit.data());
  differentiate_softmax(a, block, tile, scratch);
  add_to_keys(a.in, tile, scratch.probability.data(), scratch.d_out.data(), side.d_v);
  add_to_keys(a.in, tile, scratch.d_logit.data(), scratch.q.data(), side.d_k);
  add_to_queries(a, block, tile, side.k, scratch);
}

// This thread's part of `count` tasks. Where key-value heads divide evenly among the threads, it
// holds whole heads, the same ones for every multiple of kv_heads.
Range my_part(std::int64_t count) {
  return range_of_part(count, 1, omp_get_thread_num(), omp_get_num_threads());
}

// Tiles `index` of all blocks. Those of blocks `kPhases` apart have no key in common.
template <class T>
void differentiate_diagonal(const BackwardArrays<T>& a,
                            std::int64_t index,
                            BackwardScratch<T>& scratch) {
  constexpr std::int64_t kPhases = kKeyTile / kQueryBlock;
  const std::int64_t blocks = a.in.num_blocks();
  const bool threads_share_heads = a.in.kv_heads % omp_get_num_threads() != 0;
  for (std::int64_t phase = 0; phase < std::min(kPhases, blocks); ++phase) {
    const std::int64_t per_head = (blocks - phase + kPhases - 1) / kPhases;
    const Range tasks = my_part(a.in.kv_heads * per_head);
    for (std::int64_t task = tasks.begin; task < tasks.end; ++task) {
      const std::int64_t g = task / per_head;
      const QueryBlock block = query_block(a.in, g, phase + task % per_head * kPhases);
      if (index < num_window_tiles(a.in, block)) {
        differentiate_tile(a, block, window_tile(a.in, block, index), a.window_of(g), scratch);
      }
    }
    if (threads_share_heads) {
#pragma omp barrier
    }
  }
}

// Blocks of one document share its pinned keys, so only key-value heads run side by side.
template <class T>
void differentiate_pinned(const BackwardArrays<T>& a, BackwardScratch<T>& scratch) {
  const Range heads = my_part(a.in.kv_heads);
  for (std::int64_t g = heads.begin; g < heads.end; ++g) {
    for (std::int64_t i = 0; i < a.in.num_blocks(); ++i) {
      const QueryBlock block = query_block(a.in, g, i);
      for_each_pinned_tile(a.in, block, [&](const KeyTile& tile) {
        differentiate_tile(a, block, tile, a.pinned_of(g), scratch);
      });
    }
  }
}

template <class T>
std::vector<T> make_delta(const AttentionArrays<T>& a, const T* d_out, const T* out) {
  const std::int64_t rows = a.tokens * a.heads;
  std::vector<T> delta(static_cast<std::size_t>(rows));
  T* to = delta.data();
  parallel_ranges(rows, 16, a.dim / 8, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      to[row] = dot(d_out + row * a.dim, out + row * a.dim, a.dim);
    }
  });
  return delta;
}

template <class T>
void add_sink_gradient(const AttentionArrays<T>& a, const T* lse, const T* delta, T* d_sink) {
  parallel_ranges(a.heads, 1, 4 * a.tokens, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t h = begin; h < end; ++h) {
      double sum = 0.0;
      for (std::int64_t t = 0; t < a.tokens; ++t) {
        const T share = fast_exp(a.sink[h] - lse[t * a.heads + h]);
        sum += static_cast<double>(share) * static_cast<double>(delta[t * a.heads + h]);
      }
      d_sink[h] -= static_cast<T>(sum);
    }
  });
}

template <class T>
void differentiate(const SlidingAttentionBackward& op) {
  const AttentionArrays<T> in(op.inputs);
  const std::vector<T> delta = make_delta(in, op.d_out.as<T>(), op.out.as<T>());
  if (in.sink != nullptr) {
    add_sink_gradient(in, op.lse.as<T>(), delta.data(), op.d_sink.as<T>());
  }
  if (!op.d_q) {
    return;
  }
  BackwardArrays<T> a{in,
                      op.d_out.as<T>(),
                      op.lse.as<T>(),
                      delta.data(),
                      op.d_q.as<T>(),
                      {in.k, in.v, op.d_k.as<T>(), op.d_v.as<T>()},
                      {}};
  std::vector<TensorView> overwritten{op.d_q, op.d_k, op.d_v};
  if (in.pinned_k != nullptr) {
    a.pinned = {in.pinned_k, in.pinned_v, op.d_pinned_k.as<T>(), op.d_pinned_v.as<T>()};
    overwritten.insert(overwritten.end(), {op.d_pinned_k, op.d_pinned_v});
  }
  for (const TensorView& tensor : overwritten) {
    std::fill_n(tensor.as<T>(), tensor.size(), T{0});
  }
  std::int64_t diagonals = 0;
  for (std::int64_t i = 0; i < in.num_blocks(); ++i) {
    diagonals = std::max(diagonals, num_window_tiles(in, query_block(in, 0, i)));
  }
  keep_blas_on_calling_thread();
#pragma omp parallel if (!in.is_small())
  {
    BackwardScratch<T> scratch(in);
    for (std::int64_t index = 0; index < diagonals; ++index) {
      differentiate_diagonal(a, index, scratch);
    }
    if (in.pinned_k != nullptr) {
      differentiate_pinned(a, scratch);
    }
  }
}

}  // namespace

void SlidingAttentionBackward::check() const {
  const DType type = d_out.dtype;
  check_attention_inputs(inputs, type);
  require_tensor(kWhere, "d_out", d_out, type, inputs.q.shape);
  require_tensor(kWhere, "out", out, type, inputs.q.shape);
  require_tensor(kWhere, "lse", lse, sum_type(type), {inputs.q.shape[0], inputs.q.shape[1]});
  if (inputs.sink) {
    require_tensor(kWhere, "d_sink", d_sink, sum_type(type), inputs.sink.shape);
  }
  if (!d_q) {
    BIFOCAL_REQUIRE(
        inputs.sink && !d_k && !d_v && !d_pinned_k && !d_pinned_v,
        "[{}] wanted d_q with all other gradients, or d_sink alone, got a part: pass all",
        kWhere);
    return;
  }
  require_tensor(kWhere, "d_q", d_q, type, inputs.q.shape);
  require_tensor(kWhere, "d_k", d_k, type, inputs.k.shape);
  require_tensor(kWhere, "d_v", d_v, type, inputs.k.shape);
  if (inputs.pinned_k) {
    require_tensor(kWhere, "d_pinned_k", d_pinned_k, type, inputs.pinned_k.shape);
    require_tensor(kWhere, "d_pinned_v", d_pinned_v, type, inputs.pinned_k.shape);
  }
}

void run(CpuStream& stream, const SlidingAttentionBackward& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tuple_cat(
            std::tie(
                o.d_q, o.d_k, o.d_v, o.d_sink, o.d_pinned_k, o.d_pinned_v, o.d_out, o.out, o.lse),
            kAttentionTensors(o.inputs));
      })) {
    return;
  }
  require_key_ranges(op.inputs);
  dispatch_real(kWhere, op.d_out.dtype, [&](auto type) { differentiate<decltype(type)>(op); });
}

}  // namespace bifocal
