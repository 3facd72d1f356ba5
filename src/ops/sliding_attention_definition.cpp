// The definition of sliding attention as plain loops: slow, and what every other path is tested
// against.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/sliding_attention.h"

namespace bifocal {

namespace {

// One key that a query sees: which buffer it lies in and its row there.
struct Key {
  bool is_pinned;
  std::int64_t row;
};

std::vector<Key> visible_keys(const AttentionInputs& in, std::int64_t t) {
  std::vector<Key> keys;
  if (in.pinned_k) {
    for (std::int64_t j = in.pinned_begin.as<std::int32_t>()[t];
         j < in.pinned_end.as<std::int32_t>()[t];
         ++j) {
      keys.push_back({true, j});
    }
  }
  const std::int64_t own = in.k.shape[0] - in.q.shape[0] + t;
  for (std::int64_t j = in.key_begin.as<std::int32_t>()[t]; j <= own; ++j) {
    keys.push_back({false, j});
  }
  return keys;
}

template <class T>
T dot(const T* a, const T* b, std::int64_t n) {
  T sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

// y += factor * x
template <class T>
void add_scaled(T factor, const T* x, std::int64_t n, T* y) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] += factor * x[i];
  }
}

template <class T>
void fill_zero(const TensorView& x) {
  std::fill_n(x.as<T>(), x.size(), T(0));
}

template <class T>
void define_forward(const SlidingAttentionForward& op) {
  const AttentionInputs& in = op.inputs;
  const std::int64_t tokens = in.q.shape[0];
  const std::int64_t heads = in.q.shape[1];
  const std::int64_t dim = in.q.shape[2];
  const std::int64_t kv_heads = in.k.shape[1];
  const T scale = T(1) / std::sqrt(static_cast<T>(dim));
  fill_zero<T>(op.out);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::vector<Key> keys = visible_keys(in, t);
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t g = h / (heads / kv_heads);
      const T* q = in.q.as<T>() + (t * heads + h) * dim;
      std::vector<T> logits;
      for (const Key& key : keys) {
        const T* k = (key.is_pinned ? in.pinned_k : in.k).as<T>();
        logits.push_back(scale * dot(q, k + (key.row * kv_heads + g) * dim, dim));
      }
      T largest = *std::max_element(logits.begin(), logits.end());
      if (in.sink) {
        largest = std::max(largest, in.sink.as<T>()[h]);
      }
      T sum = in.sink ? std::exp(in.sink.as<T>()[h] - largest) : T(0);
      for (const T z : logits) {
        sum += std::exp(z - largest);
      }
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const T* v = (keys[i].is_pinned ? in.pinned_v : in.v).as<T>();
        add_scaled(std::exp(logits[i] - largest) / sum,
                   v + (keys[i].row * kv_heads + g) * dim,
                   dim,
                   op.out.as<T>() + (t * heads + h) * dim);
      }
      op.lse.as<T>()[t * heads + h] = largest + std::log(sum);
    }
  }
}

template <class T>
void define_backward(const SlidingAttentionBackward& op) {
  const AttentionInputs& in = op.inputs;
  const std::int64_t tokens = in.q.shape[0];
  const std::int64_t heads = in.q.shape[1];
  const std::int64_t dim = in.q.shape[2];
  const std::int64_t kv_heads = in.k.shape[1];
  const T scale = T(1) / std::sqrt(static_cast<T>(dim));
  fill_zero<T>(op.d_q);
  fill_zero<T>(op.d_k);
  fill_zero<T>(op.d_v);
  if (in.pinned_k) {
    fill_zero<T>(op.d_pinned_k);
    fill_zero<T>(op.d_pinned_v);
  }
  std::vector<double> d_sink(static_cast<std::size_t>(heads), 0.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::vector<Key> keys = visible_keys(in, t);
    for (std::int64_t h = 0; h < heads; ++h) {
      const std::int64_t at = (t * heads + h) * dim;
      const T* q = in.q.as<T>() + at;
      const T* d_out = op.d_out.as<T>() + at;
      const T lse = op.lse.as<T>()[t * heads + h];
      const T delta = dot(d_out, op.out.as<T>() + at, dim);
      for (const Key& key : keys) {
        const std::int64_t row = (key.row * kv_heads + h / (heads / kv_heads)) * dim;
        const T* k = (key.is_pinned ? in.pinned_k : in.k).as<T>() + row;
        const T* v = (key.is_pinned ? in.pinned_v : in.v).as<T>() + row;
        const T p = std::exp(scale * dot(q, k, dim) - lse);
        const T d_logit = p * (dot(d_out, v, dim) - delta);
        add_scaled(scale * d_logit, k, dim, op.d_q.as<T>() + at);
        add_scaled(scale * d_logit, q, dim, (key.is_pinned ? op.d_pinned_k : op.d_k).as<T>() + row);
        add_scaled(p, d_out, dim, (key.is_pinned ? op.d_pinned_v : op.d_v).as<T>() + row);
      }
      if (in.sink) {
        d_sink[static_cast<std::size_t>(h)] -= std::exp(in.sink.as<T>()[h] - lse) * delta;
      }
    }
  }
  if (in.sink) {
    for (std::int64_t h = 0; h < heads; ++h) {
      op.d_sink.as<T>()[h] += static_cast<T>(d_sink[static_cast<std::size_t>(h)]);
    }
  }
}

}  // namespace

void sliding_attention_definition(const SlidingAttentionForward& op) {
  dispatch_real(
      "sliding_attention", op.out.dtype, [&](auto type) { define_forward<decltype(type)>(op); });
}

void sliding_attention_definition(const SlidingAttentionBackward& op) {
  dispatch_real(
      "sliding_attention", op.d_q.dtype, [&](auto type) { define_backward<decltype(type)>(op); });
}

}  // namespace bifocal
