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

}  // namespace

LayerCache::LayerCache(Context context,
                       const ModelConfig& config,
                       const MixerSettings& settings,
                       std::int64_t batch)
    : context_(context),
      settings_(settings),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim) {
  const auto allocate = [&](DType type, const Shape& shape) {
    return context_.memory.empty(Region::cache, type, shape);
  };
  if (settings.has_near()) {
    caches_.resize(static_cast<std::size_t>(batch));
    if (!settings.is_full()) {
      for (KeyValues& cache : caches_) {
        const Shape shape{settings.window + pinned_tokens(settings), config.kv_width()};
        cache = {allocate(context.dtype, shape), allocate(context.dtype, shape)};
      }
    }
  }
  if (settings.has_far()) {
    const std::int64_t states = settings.num_states(config.heads, config.kv_heads);
    const DType type = sum_type(context.dtype);
    c_ = allocate(type, {batch, states, head_dim_, head_dim_});
    n_ = allocate(type, {batch, states, head_dim_});
    m_ = allocate(type, {batch, states});
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

bool LayerCache::make_room(std::int64_t slot, std::int64_t tokens) {
  if (!settings_.is_full()) {
    return false;
  }
  KeyValues& cache = of(slot);
  const std::int64_t capacity = cache.k ? cache.k.shape()[0] : 0;
  if (tokens <= capacity) {
    return false;
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
  return true;
}

void LayerCache::append(std::int64_t slot,
                        const ChunkPlan& plan,
                        const ConstTensorView& k,
                        const ConstTensorView& v) {
  make_room(slot, plan.position + plan.count);
  const KeyValues& cache = of(slot);
  const Shape flat{plan.count, kv_heads_ * head_dim_};
  for (const ChunkPlan::Write& write : plan.writes) {
    if (write.begin >= write.end) {
      continue;
    }
    for (const auto& [to, from] : {std::pair{&cache.k, &k}, std::pair{&cache.v, &v}}) {
      run(context_.stream,
          CacheWrite{.cache = *to,
                     .rows = from->reshape(flat).rows(write.begin, write.end),
                     .slots = write.slots});
    }
  }
}

// rows [count, kv_heads, head_dim] become those of the slots.
void LayerCache::read(const Tensor& cache,
                      const ConstTensorView& slots,
                      const TensorView& rows) const {
  const std::int64_t count = rows.shape[0];
  if (count == 0) {
    return;
  }
  run(context_.stream,
      CacheRead{
          .rows = rows.reshape({count, kv_heads_ * head_dim_}), .cache = cache, .slots = slots});
}

// The first tokens of the document: those before the chunk from the cache, the others its own.
TensorView LayerCache::pinned_rows(
    Use use, const ChunkPlan& plan, const TensorView& own, const Tensor& cache, Scratch& scratch) {
  const TensorView rows = scratch.take(use, context_.dtype, {plan.pinned, kv_heads_, head_dim_});
  read(cache, plan.pinned_slots, rows.rows(0, plan.cached));
  if (plan.cached < plan.pinned) {
    const std::int64_t first = plan.halo + plan.cached - plan.position;
    run(context_.stream,
        Copy{.y = rows.rows(plan.cached, plan.pinned),
             .x = own.rows(first, first + plan.pinned - plan.cached)});
  }
  return rows;
}

AttentionInputs LayerCache::attention_inputs(std::int64_t slot,
                                             const ChunkPlan& plan,
                                             const TensorView& k,
                                             const TensorView& v,
                                             Scratch& scratch) {
  const KeyValues& cache = of(slot);
  AttentionInputs inputs{.k = k, .v = v, .key_begin = plan.key_begin};
  if (settings_.is_full()) {
    const std::int64_t tokens = plan.position + plan.count;
    const Shape shape{tokens, kv_heads_, head_dim_};
    inputs.k = cache.k.rows(0, tokens).reshape(shape);
    inputs.v = cache.v.rows(0, tokens).reshape(shape);
    return inputs;
  }
  read(cache.k, plan.halo_slots, k.rows(0, plan.halo));
  read(cache.v, plan.halo_slots, v.rows(0, plan.halo));
  if (pinned_tokens(settings_) > 0) {
    inputs.pinned_k = pinned_rows(Use::pinned_k, plan, k, cache.k, scratch);
    inputs.pinned_v = pinned_rows(Use::pinned_v, plan, v, cache.v, scratch);
    inputs.pinned_begin = plan.pinned_begin;
    inputs.pinned_end = plan.pinned_end;
  }
  return inputs;
}

}  // namespace bifocal
