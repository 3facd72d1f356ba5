// One query per sequence over a key-value cache.
#include "ops/decode_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "decode_attention";

template <class T>
struct Decode {
  T* out;
  const T *q, *k, *v, *sink;
  const std::int32_t* counts;
  std::int64_t heads, kv_heads, head_dim, slots;

  // Query head `head` of sequence `sequence`; scores has room for all slots.
  void attend(std::int64_t sequence, std::int64_t head, T* scores) const {
    const std::int64_t stride = kv_heads * head_dim;
    const std::int64_t first = sequence * slots * stride + head / (heads / kv_heads) * head_dim;
    const std::int64_t own = (sequence * heads + head) * head_dim;
    const std::int64_t count = counts[sequence];
    const T scale = T{1} / std::sqrt(static_cast<T>(head_dim));
    T* to = out + own;
    std::fill_n(to, head_dim, T{0});
    if (count == 0) {
      return;
    }
    for (std::int64_t slot = 0; slot < count; ++slot) {
      scores[slot] = scale * dot(q + own, k + first + slot * stride, head_dim);
    }
    T largest = row_max(scores, count);
    if (sink != nullptr) {
      largest = std::max(largest, sink[head]);
    }
    T sum = exp_row(scores, scores, largest, count);
    if (sink != nullptr) {
      sum += fast_exp(sink[head] - largest);
    }
    for (std::int64_t slot = 0; slot < count; ++slot) {
      axpy(to, scores[slot], v + first + slot * stride, head_dim);
    }
    scale_row(to, T{1} / sum, head_dim);
  }
};

template <class T>
void decode(const DecodeAttention& op) {
  const std::int64_t heads = op.q.shape[1];
  const std::int64_t slots = op.k.shape[1];
  const std::int64_t head_dim = op.q.shape[2];
  const Decode<T> part{op.out.as<T>(),
                       op.q.as<T>(),
                       op.k.as<T>(),
                       op.v.as<T>(),
                       op.sink ? op.sink.as<T>() : nullptr,
                       op.counts.as<std::int32_t>(),
                       heads,
                       op.k.shape[2] / head_dim,
                       head_dim,
                       slots};
  parallel_ranges(op.q.shape[0] * heads,
                  1,
                  1 + slots * head_dim / 8,
                  [&](std::int64_t begin, std::int64_t end) {
                    std::vector<T> scores(static_cast<std::size_t>(slots));
                    for (std::int64_t i = begin; i < end; ++i) {
                      part.attend(i / heads, i % heads, scores.data());
                    }
                  });
}

}  // namespace

void DecodeAttention::check() const {
  const std::int64_t batch = q.shape[0];
  const std::int64_t heads = q.shape[1];
  const std::int64_t head_dim = q.shape[2];
  const std::int64_t kv_width = k.shape[2];
  require_tensor(kWhere, "q", q, out.dtype, {batch, heads, head_dim});
  require_tensor(kWhere, "out", out, out.dtype, {batch, heads, head_dim});
  BIFOCAL_REQUIRE(head_dim > 0 && kv_width >= head_dim && kv_width % head_dim == 0 &&
                      heads % (kv_width / head_dim) == 0,
                  "[{}] wanted keys of whole heads of {} that divide {} query heads, got width {}: "
                  "check the cache's shape",
                  kWhere,
                  head_dim,
                  heads,
                  kv_width);
  require_tensor(kWhere, "k", k, out.dtype, {batch, k.shape[1], kv_width});
  require_tensor(kWhere, "v", v, out.dtype, {batch, k.shape[1], kv_width});
  require_tensor(kWhere, "counts", counts, DType::i32, {batch});
  if (sink) {
    require_tensor(kWhere, "sink", sink, out.dtype, {heads});
  }
}

void run(CpuStream&, const DecodeAttention& op) {
  const auto* counts = op.counts.as<std::int32_t>();
  for (std::int64_t i = 0; i < op.counts.size(); ++i) {
    BIFOCAL_REQUIRE(counts[i] >= 0 && counts[i] <= op.k.shape[1],
                    "[{}] wanted counts from 0 to {} slots, got {} for sequence {}: the cache is "
                    "overrun",
                    kWhere,
                    op.k.shape[1],
                    counts[i],
                    i);
  }
  dispatch_real(kWhere, op.out.dtype, [&]<class T>(T) { decode<T>(op); });
}

void CacheWrite::check() const {
  const std::int64_t batch = cache.shape[0];
  require_tensor(kWhere, "cache", cache, cache.dtype, {batch, cache.shape[1], cache.shape[2]});
  require_tensor(kWhere, "rows", rows, cache.dtype, {batch, cache.shape[2]});
  require_tensor(kWhere, "slots", slots, DType::i32, {batch});
}

void run(CpuStream&, const CacheWrite& op) {
  const std::size_t row_bytes =
      static_cast<std::size_t>(op.cache.shape[2]) * size_of(op.cache.dtype);
  const std::int64_t capacity = op.cache.shape[1];
  const auto* slots = op.slots.as<std::int32_t>();
  for (std::int64_t b = 0; b < op.cache.shape[0]; ++b) {
    if (slots[b] < 0) {
      continue;
    }
    BIFOCAL_REQUIRE(slots[b] < capacity,
                    "[{}] wanted a slot below the cache's {}, got {}: generate fewer tokens",
                    kWhere,
                    capacity,
                    slots[b]);
    const auto to = static_cast<std::size_t>(b * capacity + slots[b]) * row_bytes;
    const auto from = static_cast<std::size_t>(b) * row_bytes;
    std::memcpy(static_cast<std::byte*>(op.cache.data) + to,
                static_cast<const std::byte*>(op.rows.data) + from,
                row_bytes);
  }
}

}  // namespace bifocal
