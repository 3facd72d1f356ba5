// Sliding attention, forward: checks, and softmax over key tiles with a running maximum.
#include "ops/sliding_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/attention_tile.h"
#include "ops/blas.h"
#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "sliding_attention";

// A thread's scratch for one block. rows = kQueryBlock * group, in the order [token, group].
template <class T>
struct ForwardScratch {
  std::vector<T> q;            // [rows, head_dim], scaled
  std::vector<T> out;          // [rows, head_dim], not yet divided by `sum`
  std::vector<T> probability;  // [rows, kKeyTile]: logits, then exp(logit - largest)
  std::vector<T> largest;      // [rows], running; the sink included
  std::vector<T> sum;          // [rows]: sum of exp(logit - largest)

  explicit ForwardScratch(const AttentionArrays<T>& a) {
    const auto rows = static_cast<std::size_t>(kQueryBlock * a.group);
    q.resize(rows * static_cast<std::size_t>(a.dim));
    out.resize(q.size());
    probability.resize(rows * kKeyTile);
    largest.resize(rows);
    sum.resize(rows);
  }
};

// Turns a tile's logits into probabilities against the running maximum; masked ones become 0 and
// are never read, so that no masked key can move a bit of the result.
template <class T>
void update_softmax(const AttentionArrays<T>& a, const KeyTile& tile, ForwardScratch<T>& scratch) {
  for (std::int64_t i = tile.query_begin; i < tile.query_end; ++i) {
    const std::int64_t begin = tile.key_begin[static_cast<std::size_t>(i)];
    const std::int64_t end = tile.key_end[static_cast<std::size_t>(i)];
    for (std::int64_t row = i * a.group; row < (i + 1) * a.group; ++row) {
      T* p = scratch.probability.data() + row * kKeyTile;
      std::fill(p, p + begin, T{0});
      std::fill(p + end, p + tile.count, T{0});
      if (begin == end) {
        continue;
      }
      T& largest = scratch.largest[static_cast<std::size_t>(row)];
      T& sum = scratch.sum[static_cast<std::size_t>(row)];
      const T tile_largest = row_max(p + begin, end - begin);
      if (tile_largest > largest) {
        const T factor = fast_exp(largest - tile_largest);  // 0 for the first tile without a sink
        sum *= factor;
        scale_row(scratch.out.data() + row * a.dim, factor, a.dim);
        largest = tile_largest;
      }
      sum += exp_row(p + begin, p + begin, largest, end - begin);
    }
  }
}

// Adds what the block sees in a tile of k and v, buffers of stride key_stride().
template <class T>
void add_tile(const AttentionArrays<T>& a,
              const KeyTile& tile,
              const T* k,
              const T* v,
              ForwardScratch<T>& scratch) {
  const std::int64_t first_row = tile.query_begin * a.group;
  const std::int64_t rows = tile.query_end * a.group - first_row;
  T* p = scratch.probability.data() + first_row * kKeyTile;
  gemm(Transpose::no,
       Transpose::yes,
       rows,
       tile.count,
       a.dim,
       1,
       scratch.q.data() + first_row * a.dim,
       a.dim,
       k + tile.first * a.key_stride(),
       a.key_stride(),
       0,
       p,
       kKeyTile);
  update_softmax(a, tile, scratch);
  gemm(Transpose::no,
       Transpose::no,
       rows,
       a.dim,
       tile.count,
       1,
       p,
       kKeyTile,
       v + tile.first * a.key_stride(),
       a.key_stride(),
       1,
       scratch.out.data() + first_row * a.dim,
       a.dim);
}

template <class T>
void attend_block(const AttentionArrays<T>& a,
                  const QueryBlock& block,
                  ForwardScratch<T>& scratch,
                  T* out,
                  T* lse) {
  const std::int64_t first_head = block.kv_head * a.group;
  gather_block(a, block, a.q, a.scale, scratch.q.data());
  std::fill(scratch.out.begin(), scratch.out.end(), T{0});
  for (std::size_t row = 0; row < scratch.sum.size(); ++row) {
    const std::int64_t head = first_head + static_cast<std::int64_t>(row) % a.group;
    scratch.largest[row] = a.sink == nullptr ? -std::numeric_limits<T>::infinity() : a.sink[head];
    scratch.sum[row] = a.sink == nullptr ? T{0} : T{1};
  }
  const std::int64_t head_offset = block.kv_head * a.dim;
  for_each_pinned_tile(a, block, [&](const KeyTile& tile) {
    add_tile(a, tile, a.pinned_k + head_offset, a.pinned_v + head_offset, scratch);
  });
  for (std::int64_t index = 0; index < num_window_tiles(a, block); ++index) {
    add_tile(a, window_tile(a, block, index), a.k + head_offset, a.v + head_offset, scratch);
  }
  for (std::int64_t t = block.begin; t < block.end; ++t) {
    for (std::int64_t r = 0; r < a.group; ++r) {
      const std::int64_t row = (t - block.begin) * a.group + r;
      const std::int64_t to = t * a.heads + first_head + r;
      const T sum = scratch.sum[static_cast<std::size_t>(row)];
      const T factor = T{1} / sum;
      for (std::int64_t i = 0; i < a.dim; ++i) {
        out[to * a.dim + i] = factor * scratch.out[static_cast<std::size_t>(row * a.dim + i)];
      }
      lse[to] = scratch.largest[static_cast<std::size_t>(row)] + std::log(sum);
    }
  }
}

template <class T>
void attend(const SlidingAttentionForward& op) {
  const AttentionArrays<T> a(op.inputs);
  T* out = op.out.as<T>();
  T* lse = op.lse.as<T>();
  const std::int64_t blocks = a.num_blocks();
  keep_blas_on_calling_thread();
#pragma omp parallel if (!a.is_small())
  {
    ForwardScratch<T> scratch(a);
#pragma omp for collapse(2) schedule(dynamic)
    for (std::int64_t g = 0; g < a.kv_heads; ++g) {
      for (std::int64_t i = 0; i < blocks; ++i) {
        attend_block(a, query_block(a, g, i), scratch, out, lse);
      }
    }
  }
}

}  // namespace

void check_attention_inputs(const AttentionInputs& in, DType type) {
  BIFOCAL_REQUIRE(in.q.shape.rank() == 3 && in.k.shape.rank() == 3,
                  "[{}] wanted q [tokens, heads, head_dim] and k [keys, kv_heads, head_dim], got "
                  "{} and {}: pass tensors of rank 3",
                  kWhere,
                  to_string(in.q.shape),
                  to_string(in.k.shape));
  const std::int64_t tokens = in.q.shape[0];
  const std::int64_t heads = in.q.shape[1];
  const std::int64_t dim = in.q.shape[2];
  const std::int64_t keys = in.k.shape[0];
  const std::int64_t kv_heads = in.k.shape[1];
  BIFOCAL_REQUIRE(keys >= tokens,
                  "[{}] wanted at least as many keys as queries, got {} keys and {} queries: put "
                  "the keys of the queries' own tokens last",
                  kWhere,
                  keys,
                  tokens);
  BIFOCAL_REQUIRE(dim > 0 && kv_heads > 0 && heads % kv_heads == 0,
                  "[{}] wanted heads to be a multiple of kv_heads and head_dim > 0, got {} heads, "
                  "{} kv_heads, head_dim {}: correct the model's shape",
                  kWhere,
                  heads,
                  kv_heads,
                  dim);
  require_tensor(kWhere, "q", in.q, type, {tokens, heads, dim});
  require_tensor(kWhere, "k", in.k, type, {keys, kv_heads, dim});
  require_tensor(kWhere, "v", in.v, type, {keys, kv_heads, dim});
  require_tensor(kWhere, "key_begin", in.key_begin, DType::i32, {tokens});
  if (in.sink) {
    require_tensor(kWhere, "sink", in.sink, type, {heads});
  }
  if (in.pinned_k) {
    const Shape pinned{in.pinned_k.shape[0], kv_heads, dim};
    require_tensor(kWhere, "pinned_k", in.pinned_k, type, pinned);
    require_tensor(kWhere, "pinned_v", in.pinned_v, type, pinned);
    require_tensor(kWhere, "pinned_begin", in.pinned_begin, DType::i32, {tokens});
    require_tensor(kWhere, "pinned_end", in.pinned_end, DType::i32, {tokens});
  }
}

void require_key_ranges(const AttentionInputs& in) {
  const std::int64_t tokens = in.q.shape[0];
  const std::int64_t own = in.k.shape[0] - tokens;
  const auto* begin = in.key_begin.as<std::int32_t>();
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int32_t least = t == 0 ? 0 : begin[t - 1];
    BIFOCAL_REQUIRE(least <= begin[t] && begin[t] <= own + t,
                    "[{}] wanted key_begin[{}] in [{}, {}], got {}: key_begin must not decrease "
                    "nor pass the query's own key",
                    kWhere,
                    t,
                    least,
                    own + t,
                    begin[t]);
  }
  if (!in.pinned_k) {
    return;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int32_t first = in.pinned_begin.as<std::int32_t>()[t];
    const std::int32_t last = in.pinned_end.as<std::int32_t>()[t];
    BIFOCAL_REQUIRE(first >= last || (first >= 0 && last <= in.pinned_k.shape[0]),
                    "[{}] wanted pinned keys of query {} within [0, {}), got [{}, {}): correct "
                    "pinned_begin and pinned_end",
                    kWhere,
                    t,
                    in.pinned_k.shape[0],
                    first,
                    last);
  }
}

void SlidingAttentionForward::check() const {
  check_attention_inputs(inputs, out.dtype);
  require_tensor(kWhere, "out", out, out.dtype, inputs.q.shape);
  require_tensor(kWhere, "lse", lse, sum_type(out.dtype), {inputs.q.shape[0], inputs.q.shape[1]});
}

void run(CpuStream& stream, const SlidingAttentionForward& op) {
  if (run_widened(stream, op, [](auto& o) {
        return std::tuple_cat(std::tie(o.out, o.lse), kAttentionTensors(o.inputs));
      })) {
    return;
  }
  require_key_ranges(op.inputs);
  dispatch_real(kWhere, op.out.dtype, [&](auto type) { attend<decltype(type)>(op); });
}

}  // namespace bifocal
