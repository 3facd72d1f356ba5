// One query per sequence over a key-value cache.
#include "ops/decode_attention.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "decode_attention";

template <class T>
struct Decode {
  T* out;
  const T *q, *sink;
  std::span<const ConstTensorView> k, v;
  std::int64_t heads, kv_heads, head_dim;

  // Query head `head` of a row; scores has room for the row's slots.
  void attend(std::int64_t row, std::int64_t head, T* scores) const {
    const std::int64_t stride = kv_heads * head_dim;
    const std::int64_t first = head / (heads / kv_heads) * head_dim;
    const std::int64_t own = (row * heads + head) * head_dim;
    const ConstTensorView& row_k = k[static_cast<std::size_t>(row)];
    const std::int64_t count = row_k.shape[0];
    const T scale = T{1} / std::sqrt(static_cast<T>(head_dim));
    T* to = out + own;
    std::fill_n(to, head_dim, T{0});
    if (count == 0) {
      return;
    }
    const T* keys = row_k.as<T>() + first;
    const T* values = v[static_cast<std::size_t>(row)].as<T>() + first;
    for (std::int64_t slot = 0; slot < count; ++slot) {
      scores[slot] = scale * dot(q + own, keys + slot * stride, head_dim);
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
      axpy(to, scores[slot], values + slot * stride, head_dim);
    }
    scale_row(to, T{1} / sum, head_dim);
  }
};

std::int64_t most_slots(const DecodeAttention& op) {
  std::int64_t most = 0;
  for (const ConstTensorView& k : op.k) {
    most = std::max(most, k.shape[0]);
  }
  return most;
}

std::int64_t total_slots(const DecodeAttention& op) {
  std::int64_t total = 0;
  for (const ConstTensorView& k : op.k) {
    total += k.shape[0];
  }
  return total;
}

// Rows differ in length and heads are few: threads take what comes next.
template <class T>
void decode(const DecodeAttention& op) {
  constexpr std::int64_t kWorthThreads = 200000;  // multiply-adds
  const std::int64_t heads = op.q.shape[1];
  const std::int64_t head_dim = op.q.shape[2];
  const std::int64_t items = op.q.shape[0] * heads;
  if (items == 0) {
    return;
  }
  const Decode<T> part{op.out.as<T>(),
                       op.q.as<T>(),
                       op.sink ? op.sink.as<T>() : nullptr,
                       op.k,
                       op.v,
                       heads,
                       op.k.front().shape[1] / head_dim,
                       head_dim};
  const auto room = static_cast<std::size_t>(most_slots(op));
#pragma omp parallel if (total_slots(op) * heads * head_dim > kWorthThreads)
  {
    std::vector<T> scores(room);
#pragma omp for schedule(dynamic)
    for (std::int64_t i = 0; i < items; ++i) {
      part.attend(i / heads, i % heads, scores.data());
    }
  }
}

void require_slots(const ConstTensorView& slots, std::int64_t capacity) {
  const auto* slot = slots.as<std::int32_t>();
  for (std::int64_t i = 0; i < slots.size(); ++i) {
    BIFOCAL_REQUIRE(slot[i] >= 0 && slot[i] < capacity,
                    "[{}] wanted slots below the cache's {}, got {}: make the cache larger",
                    kWhere,
                    capacity,
                    slot[i]);
  }
}

void check_copy(const ConstTensorView& cache,
                const ConstTensorView& rows,
                const ConstTensorView& slots) {
  require_tensor(kWhere, "cache", cache, cache.dtype, {cache.shape[0], cache.shape[1]});
  require_tensor(kWhere, "rows", rows, cache.dtype, {rows.shape[0], cache.shape[1]});
  require_tensor(kWhere, "slots", slots, DType::i32, {rows.shape[0]});
}

}  // namespace

void DecodeAttention::check() const {
  const std::int64_t rows = q.shape[0];
  const std::int64_t heads = q.shape[1];
  const std::int64_t head_dim = q.shape[2];
  require_tensor(kWhere, "q", q, out.dtype, {rows, heads, head_dim});
  require_tensor(kWhere, "out", out, out.dtype, {rows, heads, head_dim});
  BIFOCAL_REQUIRE(static_cast<std::int64_t>(k.size()) == rows && v.size() == k.size(),
                  "[{}] wanted keys and values of {} rows, got {} and {}: pass one cache a row",
                  kWhere,
                  rows,
                  k.size(),
                  v.size());
  for (std::size_t row = 0; row < k.size(); ++row) {
    const std::int64_t width = k.front().shape[1];
    BIFOCAL_REQUIRE(head_dim > 0 && width >= head_dim && width % head_dim == 0 &&
                        heads % (width / head_dim) == 0,
                    "[{}] wanted keys of whole heads of {} that divide {} query heads, got width "
                    "{}: check the cache's shape",
                    kWhere,
                    head_dim,
                    heads,
                    width);
    require_tensor(kWhere, "k", k[row], out.dtype, {k[row].shape[0], width});
    require_tensor(kWhere, "v", v[row], out.dtype, {k[row].shape[0], width});
  }
  if (sink) {
    require_tensor(kWhere, "sink", sink, out.dtype, {heads});
  }
}

void run(CpuStream& /*stream*/, const DecodeAttention& op) {
  dispatch_real(kWhere, op.out.dtype, [&]<class T>(T) { decode<T>(op); });
}

void CacheWrite::check() const {
  check_copy(cache, rows, slots);
}

void CacheRead::check() const {
  check_copy(cache, rows, slots);
}

void run(CpuStream& /*stream*/, const CacheWrite& op) {
  require_slots(op.slots, op.cache.shape[0]);
  const auto* slots = op.slots.as<std::int32_t>();
  for (std::int64_t i = 0; i < op.rows.shape[0]; ++i) {
    const TensorView to = op.cache.rows(slots[i], slots[i] + 1);
    std::memcpy(to.data, op.rows.rows(i, i + 1).data, to.bytes());
  }
}

void run(CpuStream& /*stream*/, const CacheRead& op) {
  require_slots(op.slots, op.cache.shape[0]);
  const auto* slots = op.slots.as<std::int32_t>();
  for (std::int64_t i = 0; i < op.rows.shape[0]; ++i) {
    const TensorView to = op.rows.rows(i, i + 1);
    std::memcpy(to.data, op.cache.rows(slots[i], slots[i] + 1).data, to.bytes());
  }
}

}  // namespace bifocal
