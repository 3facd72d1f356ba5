// Inputs and outputs of sliding attention over packed documents, for its tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/memory.h"
#include "ops/sliding_attention.h"
#include "support/fill.h"

namespace bifocal::test {

inline constexpr std::int64_t kFull = std::numeric_limits<std::int32_t>::max();

struct Layout {
  std::vector<std::int64_t> documents{64};  // lengths; the first `halo` tokens have no queries
  std::int64_t halo = 0;
  std::int64_t window = kFull;
  std::int64_t heads = 4, kv_heads = 2, dim = 8;
  std::int64_t pinned = 0;  // first tokens of each document that stay readable
  bool has_sink = true;
  double sink_mean = 0.0;

  std::int64_t keys() const {
    std::int64_t sum = 0;
    for (const std::int64_t length : documents) {
      sum += length;
    }
    return sum;
  }

  std::int64_t tokens() const { return keys() - halo; }

  std::string describe() const {
    std::string text = fmt::format(
        "heads {} kv_heads {} dim {} window {} halo {} pinned {} sink {} "
        "documents",
        heads,
        kv_heads,
        dim,
        window,
        halo,
        pinned,
        has_sink);
    for (const std::int64_t length : documents) {
      text += fmt::format(" {}", length);
    }
    return text;
  }
};

// All tensors of both passes. Outputs start as NaN and d_sink as 0.5.
struct Problem {
  Memory& memory;
  bool has_sink, has_pinned;
  Tensor q, k, v, key_begin, sink, pinned_k, pinned_v, pinned_begin, pinned_end, d_out;
  Tensor out, lse, d_q, d_k, d_v, d_sink, d_pinned_k, d_pinned_v;

  Problem(Memory& owner, const Layout& layout, DType type)
      : memory(owner), has_sink(layout.has_sink), has_pinned(layout.pinned > 0) {
    const Shape query{layout.tokens(), layout.heads, layout.dim};
    const Shape key{layout.keys(), layout.kv_heads, layout.dim};
    const std::int64_t pinned = layout.pinned * static_cast<std::int64_t>(layout.documents.size());
    q = normal_tensor(memory, type, query, 1, 1.5);
    k = normal_tensor(memory, type, key, 2, 1.5);
    v = normal_tensor(memory, type, key, 3);
    d_out = normal_tensor(memory, type, query, 4);
    sink = memory.empty(Region::activations, type, {layout.heads});
    fill_normal(sink, 5, 1.0, layout.sink_mean);
    pinned_k = normal_tensor(memory, type, {pinned, layout.kv_heads, layout.dim}, 6);
    pinned_v = normal_tensor(memory, type, {pinned, layout.kv_heads, layout.dim}, 7);
    make_ranges(layout);
    make_outputs();
  }

  // The same stored inputs in another type.
  Problem(const Problem& other, DType type)
      : memory(other.memory), has_sink(other.has_sink), has_pinned(other.has_pinned) {
    q = copy_as(memory, type, other.q);
    k = copy_as(memory, type, other.k);
    v = copy_as(memory, type, other.v);
    d_out = copy_as(memory, type, other.d_out);
    sink = copy_as(memory, type, other.sink);
    pinned_k = copy_as(memory, type, other.pinned_k);
    pinned_v = copy_as(memory, type, other.pinned_v);
    const auto copy_range = [&](const Tensor& x) {
      return tensor_of(
          memory, std::vector<std::int32_t>(x.as<std::int32_t>(), x.as<std::int32_t>() + x.size()));
    };
    key_begin = copy_range(other.key_begin);
    pinned_begin = copy_range(other.pinned_begin);
    pinned_end = copy_range(other.pinned_end);
    make_outputs();
  }

  void make_ranges(const Layout& layout) {
    std::vector<std::int32_t> begins;
    std::vector<std::int32_t> firsts;
    std::vector<std::int32_t> lasts;
    std::int64_t start = 0;
    for (std::size_t document = 0; document < layout.documents.size(); ++document) {
      const std::int64_t length = layout.documents[document];
      for (std::int64_t i = start; i < start + length; ++i) {
        if (i < layout.halo) {
          continue;
        }
        const std::int64_t begin = std::max(start, i - layout.window + 1);
        const auto first = static_cast<std::int64_t>(document) * layout.pinned;
        begins.push_back(static_cast<std::int32_t>(begin));
        firsts.push_back(static_cast<std::int32_t>(first));
        lasts.push_back(static_cast<std::int32_t>(first + std::min(layout.pinned, begin - start)));
      }
      start += length;
    }
    key_begin = tensor_of(memory, begins);
    pinned_begin = tensor_of(memory, firsts);
    pinned_end = tensor_of(memory, lasts);
  }

  void make_outputs() {
    const auto untouched = [&](const Shape& shape) {
      Tensor x = memory.empty(Region::activations, q.dtype(), shape);
      fill(x, [](std::int64_t) { return std::numeric_limits<double>::quiet_NaN(); });
      return x;
    };
    out = untouched(q.shape());
    lse = untouched({q.shape()[0], q.shape()[1]});
    d_q = untouched(q.shape());
    d_k = untouched(k.shape());
    d_v = untouched(k.shape());
    d_pinned_k = untouched(pinned_k.shape());
    d_pinned_v = untouched(pinned_k.shape());
    d_sink = memory.empty(Region::activations, q.dtype(), sink.shape());
    fill(d_sink, [](std::int64_t) { return 0.5; });
  }

  AttentionInputs inputs() const {
    AttentionInputs in{q, k, v, key_begin, {}, {}, {}, {}, {}};
    if (has_sink) {
      in.sink = sink;
    }
    if (has_pinned) {
      in.pinned_k = pinned_k;
      in.pinned_v = pinned_v;
      in.pinned_begin = pinned_begin;
      in.pinned_end = pinned_end;
    }
    return in;
  }

  SlidingAttentionForward forward() const { return {out, lse, inputs()}; }

  SlidingAttentionBackward backward() const {
    return {d_q, d_k, d_v, d_sink, d_pinned_k, d_pinned_v, d_out, out, lse, inputs()};
  }

  void run_both() const {
    CpuStream cpu;
    Stream stream{&cpu};
    run(stream, forward());
    run(stream, backward());
  }

  void define_both() const {
    sliding_attention_definition(forward());
    sliding_attention_definition(backward());
  }

  std::vector<const Tensor*> gradients() const {
    std::vector<const Tensor*> all{&d_q, &d_k, &d_v};
    if (has_sink) {
      all.push_back(&d_sink);
    }
    if (has_pinned) {
      all.insert(all.end(), {&d_pinned_k, &d_pinned_v});
    }
    return all;
  }
};

}  // namespace bifocal::test
