// Rings, pinned tokens and states.
#include "generate/layer_cache.h"

#include <algorithm>
#include <limits>

#include "ops/decode_attention.h"
#include "ops/elementwise.h"
#include "ops/fill.h"
#include "ops/transfer.h"

namespace bifocal {

namespace {

// A full layer's cache grows by a quarter and by at least so many tokens.
constexpr std::int64_t kGrowthTokens = 256;

ConstTensorView view_of(const std::vector<std::int32_t>& x) {
  return {x.data(), DType::i32, {static_cast<std::int64_t>(x.size())}};
}

}  // namespace

LayerCache::LayerCache(Context context,
                       const ModelConfig& config,
                       const MixerSettings& settings,
                       std::int64_t batch)
    : context_(context),
      settings_(settings),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim) {
  const auto allocate = [&](const Shape& shape) {
    return context_.memory.empty(Region::cache, context_.dtype, shape);
  };
  if (settings.has_near()) {
    caches_.resize(static_cast<std::size_t>(batch));
    if (!settings.is_full()) {
      for (KeyValues& cache : caches_) {
        const Shape shape{settings.window + pinned(), config.kv_width()};
        cache = {allocate(shape), allocate(shape)};
      }
    }
  }
  if (settings.has_far()) {
    const std::int64_t states = settings.num_states(config.heads, config.kv_heads);
    c_ = allocate({batch, states, head_dim_, head_dim_});
    n_ = allocate({batch, states, head_dim_});
    m_ = allocate({batch, states});
  }
  for (std::int64_t slot = 0; slot < batch; ++slot) {
    reset(slot);
  }
}

void LayerCache::reset(std::int64_t slot) {
  if (settings_.is_full() && of(slot).k) {
    of(slot) = KeyValues{};
    context_.memory.trim();
  }
  if (settings_.has_far()) {
    const MlstmState own = state(slot);
    run(context_.stream, Zero{.x = own.c});
    run(context_.stream, Zero{.x = own.n});
    run(context_.stream, Fill{.x = own.m, .value = -std::numeric_limits<double>::infinity()});
  }
}

std::size_t LayerCache::bytes() const {
  std::size_t bytes = 0;
  for (const KeyValues& cache : caches_) {
    bytes += cache.k ? cache.k.view().bytes() + cache.v.view().bytes() : 0;
  }
  for (const Tensor* tensor : {&c_, &n_, &m_}) {
    bytes += *tensor ? tensor->view().bytes() : 0;
  }
  return bytes;
}

MlstmState LayerCache::state(std::int64_t slot) const {
  const std::int64_t states = m_.shape()[1];
  return {c_.rows(slot, slot + 1).reshape({states, head_dim_, head_dim_}),
          n_.rows(slot, slot + 1).reshape({states, head_dim_}),
          m_.rows(slot, slot + 1).reshape({states})};
}

std::int64_t LayerCache::halo(std::int64_t position) const {
  return settings_.has_near() && !settings_.is_full() ? std::min(position, settings_.window - 1)
                                                      : 0;
}

std::int32_t LayerCache::place_of(std::int64_t token) const {
  const bool stays = settings_.is_full() || token < pinned();
  return static_cast<std::int32_t>(stays ? token
                                         : pinned() + (token - pinned()) % settings_.window);
}

void LayerCache::make_room(KeyValues& cache, std::int64_t tokens) {
  const std::int64_t capacity = cache.k ? cache.k.shape()[0] : 0;
  if (!settings_.is_full() || tokens <= capacity) {
    return;
  }
  const std::int64_t wanted = std::max(tokens, capacity + capacity / 4);
  const std::int64_t room = (wanted + kGrowthTokens - 1) / kGrowthTokens * kGrowthTokens;
  const auto enlarge = [&](Tensor& tensor) {
    Tensor larger =
        context_.memory.empty(Region::cache, context_.dtype, {room, kv_heads_ * head_dim_});
    if (tensor) {
      run(context_.stream, Copy{.y = larger.rows(0, capacity), .x = tensor});
    }
    tensor = std::move(larger);
  };
  try {
    enlarge(cache.k);
    enlarge(cache.v);
  } catch (const Error& error) {
    fail(
        "[generate] the cache of a layer with full attention cannot grow from {} to {} tokens: "
        "answer fewer prompts at once (--batch), or shorter\n{}",
        capacity,
        room,
        error.what());
  }
  context_.memory.trim();  // outgrown blocks fit no one
}

void LayerCache::append(std::int64_t slot,
                        std::int64_t position,
                        const ConstTensorView& k,
                        const ConstTensorView& v) {
  const std::int64_t count = k.shape[0];
  KeyValues& cache = of(slot);
  make_room(cache, position + count);
  const Shape flat{count, kv_heads_ * head_dim_};
  const auto write = [&](std::int64_t begin, std::int64_t end) {
    if (begin >= end) {
      return;
    }
    std::vector<std::int32_t> slots;
    for (std::int64_t i = begin; i < end; ++i) {
      slots.push_back(place_of(position + i));
    }
    for (const auto& [to, from] : {std::pair{&cache.k, &k}, std::pair{&cache.v, &v}}) {
      run(context_.stream,
          CacheWrite{
              .cache = *to, .rows = from->reshape(flat).rows(begin, end), .slots = view_of(slots)});
    }
  };
  if (settings_.is_full()) {
    write(0, count);
    return;
  }
  const std::int64_t first_unpinned = std::clamp<std::int64_t>(pinned() - position, 0, count);
  write(0, first_unpinned);
  write(std::max(first_unpinned, count - settings_.window), count);
}

ConstTensorView LayerCache::keys(std::int64_t slot, std::int64_t tokens) const {
  const Tensor& k = of(slot).k;
  return k.rows(0, std::min(tokens, k.shape()[0]));
}

ConstTensorView LayerCache::values(std::int64_t slot, std::int64_t tokens) const {
  const Tensor& v = of(slot).v;
  return v.rows(0, std::min(tokens, v.shape()[0]));
}

// rows [count, kv_heads, head_dim] become those of tokens first, first + 1, ...
void LayerCache::read(const Tensor& cache, std::int64_t first, const TensorView& rows) const {
  const std::int64_t count = rows.shape[0];
  if (count == 0) {
    return;
  }
  std::vector<std::int32_t> slots;
  for (std::int64_t i = 0; i < count; ++i) {
    slots.push_back(place_of(first + i));
  }
  run(context_.stream,
      CacheRead{.rows = rows.reshape({count, kv_heads_ * head_dim_}),
                .cache = cache,
                .slots = view_of(slots)});
}

// The first tokens of the document: those before the chunk from the cache, the others its own.
TensorView LayerCache::pinned_rows(Use use,
                                   const Chunk& chunk,
                                   const Tensor& cache,
                                   Scratch& scratch) {
  const std::int64_t count = std::min(pinned(), chunk.position + chunk.count);
  const std::int64_t cached = std::min(count, chunk.position);
  const TensorView rows = scratch.take(use, context_.dtype, {count, kv_heads_, head_dim_});
  read(cache, 0, rows.rows(0, cached));
  if (cached < count) {
    const TensorView& own = use == Use::pinned_k ? chunk.k : chunk.v;
    const std::int64_t first = own.shape[0] - chunk.count + cached - chunk.position;
    const TensorView to = rows.rows(cached, count);
    run(context_.stream, Copy{.y = to, .x = own.rows(first, first + count - cached)});
  }
  return rows;
}

AttentionInputs LayerCache::attention_inputs(const Chunk& chunk, Scratch& scratch) {
  const auto count = static_cast<std::size_t>(chunk.count);
  key_begin_.assign(count, 0);
  const KeyValues& cache = of(chunk.slot);
  AttentionInputs inputs{.k = chunk.k, .v = chunk.v, .key_begin = view_of(key_begin_)};
  if (settings_.is_full()) {
    const std::int64_t tokens = chunk.position + chunk.count;
    const Shape shape{tokens, kv_heads_, head_dim_};
    inputs.k = cache.k.rows(0, tokens).reshape(shape);
    inputs.v = cache.v.rows(0, tokens).reshape(shape);
    return inputs;
  }
  const std::int64_t before = halo(chunk.position);
  const std::int64_t first = chunk.position - before;
  read(cache.k, first, chunk.k.rows(0, before));
  read(cache.v, first, chunk.v.rows(0, before));
  pinned_begin_.assign(count, 0);
  pinned_end_.assign(count, 0);
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t token = chunk.position + static_cast<std::int64_t>(i);
    const std::int64_t begin = std::max<std::int64_t>(0, token - settings_.window + 1);
    key_begin_[i] = static_cast<std::int32_t>(begin - first);
    pinned_end_[i] = static_cast<std::int32_t>(std::min(pinned(), begin));
  }
  if (pinned() > 0) {
    inputs.pinned_k = pinned_rows(Use::pinned_k, chunk, cache.k, scratch);
    inputs.pinned_v = pinned_rows(Use::pinned_v, chunk, cache.v, scratch);
    inputs.pinned_begin = view_of(pinned_begin_);
    inputs.pinned_end = view_of(pinned_end_);
  }
  return inputs;
}

}  // namespace bifocal
