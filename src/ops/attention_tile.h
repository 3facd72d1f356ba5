// How both passes of sliding attention cut a row: blocks of queries against tiles of keys.
//
// A block is kQueryBlock tokens of one key-value head with all query heads that read it. Its window
// is cut into tiles of kKeyTile keys, counted back from the block's last token, so that a block and
// its tiles are the same in a whole row and in a shard that begins at a multiple of kQueryBlock. A
// tile keeps only queries and keys of which some pair is visible; since key_begin never decreases,
// those are ranges.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <tuple>

#include "ops/sliding_attention.h"

namespace bifocal {

inline constexpr std::int64_t kQueryBlock = 32;
inline constexpr std::int64_t kKeyTile = 256;
static_assert(kKeyTile % kQueryBlock == 0);

// All tensors of floating point among the inputs, for run_widened().
inline constexpr auto kAttentionTensors = [](auto& inputs) {
  return std::tie(inputs.q, inputs.k, inputs.v, inputs.sink, inputs.pinned_k, inputs.pinned_v);
};

// The inputs as arrays.
template <class T>
struct AttentionArrays {
  std::int64_t tokens, keys, heads, kv_heads, dim;
  std::int64_t group;  // query heads of a key-value head
  T scale;             // of logits
  const T *q, *k, *v, *sink, *pinned_k, *pinned_v;
  const std::int32_t *key_begin, *pinned_begin, *pinned_end;

  explicit AttentionArrays(const AttentionInputs& in)
      : tokens(in.q.shape[0]),
        keys(in.k.shape[0]),
        heads(in.q.shape[1]),
        kv_heads(in.k.shape[1]),
        dim(in.q.shape[2]),
        group(heads / kv_heads),
        scale(T{1} / std::sqrt(static_cast<T>(dim))),
        q(in.q.as<T>()),
        k(in.k.as<T>()),
        v(in.v.as<T>()),
        sink(in.sink ? in.sink.as<T>() : nullptr),
        pinned_k(in.pinned_k ? in.pinned_k.as<T>() : nullptr),
        pinned_v(in.pinned_k ? in.pinned_v.as<T>() : nullptr),
        key_begin(in.key_begin.as<std::int32_t>()),
        pinned_begin(in.pinned_k ? in.pinned_begin.as<std::int32_t>() : nullptr),
        pinned_end(in.pinned_k ? in.pinned_end.as<std::int32_t>() : nullptr) {}

  std::int64_t num_blocks() const { return (tokens + kQueryBlock - 1) / kQueryBlock; }

  // Waking a team of threads takes longer than such a problem.
  bool is_small() const { return tokens * heads * dim < 16384; }

  std::int64_t key_stride() const { return kv_heads * dim; }
};

// Throws where key_begin decreases or a range of keys leaves its buffer. Reads T numbers, hence
// not part of check(), which a device's tensors pass through too.
void require_key_ranges(const AttentionInputs& inputs);

// Shapes and types of what both passes read; `type` is that of the outputs.
void check_attention_inputs(const AttentionInputs& inputs, DType type);

struct QueryBlock {
  std::int64_t kv_head;
  std::int64_t begin, end;  // tokens
};

template <class T>
QueryBlock query_block(const AttentionArrays<T>& a, std::int64_t kv_head, std::int64_t index) {
  return {kv_head, index * kQueryBlock, std::min(a.tokens, (index + 1) * kQueryBlock)};
}

// Keys [first, first + count) of the window's or the pinned buffer, against one block. Queries are
// counted from the block's begin, keys from `first`.
struct KeyTile {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t query_begin = 0;  // queries outside [query_begin, query_end) see nothing here
  std::int64_t query_end = 0;
  std::array<std::int64_t, kQueryBlock> key_begin{};  // query i sees [key_begin[i], key_end[i])
  std::array<std::int64_t, kQueryBlock> key_end{};

  // Cuts query i's range of keys [begin, end), numbers of the buffer, to this tile.
  void set_visible(std::int64_t i, std::int64_t begin, std::int64_t end) {
    const auto at = static_cast<std::size_t>(i);
    key_begin[at] = std::max(begin - first, std::int64_t{0});
    key_end[at] = std::max(std::min(end - first, count), key_begin[at]);
    if (key_begin[at] < key_end[at]) {
      query_begin = query_end == 0 ? i : query_begin;
      query_end = i + 1;
    }
  }
};

template <class T>
std::int64_t num_window_tiles(const AttentionArrays<T>& a, const QueryBlock& block) {
  const std::int64_t end = a.keys - a.tokens + block.begin + kQueryBlock;
  return (end - a.key_begin[block.begin] + kKeyTile - 1) / kKeyTile;
}

// Tile `index` of the block's window; tile 0 ends at the block's last token.
template <class T>
KeyTile window_tile(const AttentionArrays<T>& a, const QueryBlock& block, std::int64_t index) {
  const std::int64_t own = a.keys - a.tokens;
  const std::int64_t nominal_end = own + block.begin + kQueryBlock - index * kKeyTile;
  KeyTile tile;
  tile.first = std::max<std::int64_t>(nominal_end - kKeyTile, a.key_begin[block.begin]);
  tile.count = std::min(nominal_end, own + block.end) - tile.first;
  for (std::int64_t t = block.begin; t < block.end; ++t) {
    tile.set_visible(t - block.begin, a.key_begin[t], own + t + 1);
  }
  return tile;
}

struct KeyRange {
  std::int64_t begin, end;
};

// The least range that holds all pinned keys which the block sees.
template <class T>
KeyRange pinned_range(const AttentionArrays<T>& a, const QueryBlock& block) {
  if (a.pinned_k == nullptr) {
    return {0, 0};
  }
  KeyRange range{INT64_MAX, 0};
  for (std::int64_t t = block.begin; t < block.end; ++t) {
    if (a.pinned_begin[t] < a.pinned_end[t]) {
      range.begin = std::min<std::int64_t>(range.begin, a.pinned_begin[t]);
      range.end = std::max<std::int64_t>(range.end, a.pinned_end[t]);
    }
  }
  return range.begin < range.end ? range : KeyRange{0, 0};
}

// Calls function(tile) for every tile of the pinned keys that the block sees.
template <class T, class Function>
void for_each_pinned_tile(const AttentionArrays<T>& a,
                          const QueryBlock& block,
                          const Function& function) {
  const KeyRange range = pinned_range(a, block);
  for (std::int64_t first = range.begin; first < range.end; first += kKeyTile) {
    KeyTile tile;
    tile.first = first;
    tile.count = std::min(kKeyTile, range.end - first);
    for (std::int64_t t = block.begin; t < block.end; ++t) {
      tile.set_visible(t - block.begin, a.pinned_begin[t], a.pinned_end[t]);
    }
    if (tile.query_begin < tile.query_end) {
      function(tile);
    }
  }
}

// The block's rows of x [tokens, heads, head_dim], times `factor`, as rows [token, group][head_dim]
// without gaps, so that one matrix product serves all query heads of a key-value head.
template <class T>
void gather_block(
    const AttentionArrays<T>& a, const QueryBlock& block, const T* x, T factor, T* y) {
  const std::int64_t size = a.group * a.dim;
  for (std::int64_t t = block.begin; t < block.end; ++t, y += size) {
    const T* row = x + (t * a.heads + block.kv_head * a.group) * a.dim;
    for (std::int64_t i = 0; i < size; ++i) {
      y[i] = factor * row[i];
    }
  }
}

}  // namespace bifocal
