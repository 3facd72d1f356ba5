// The order in which a decoder takes and returns its tensors.
#include "plan/dry_model.h"

#include <algorithm>

namespace bifocal {

namespace {

std::int64_t first_visible(const MixerSettings& mixer, std::int64_t token) {
  return mixer.is_full() ? 0 : std::max<std::int64_t>(0, token - mixer.window + 1);
}

}  // namespace

DryShard::DryShard(Ledger& ledger, std::int64_t row_tokens, std::int64_t ranks, std::int64_t rank)
    : ledger_(&ledger),
      row_tokens_(row_tokens),
      ranks_(static_cast<int>(ranks)),
      own_(shard_range(row_tokens, ranks_, static_cast<int>(rank))),
      held_(ledger) {
  // Positions and starts; ids, next and keep.
  for (const DType dtype : {DType::i32, DType::u8, DType::i32, DType::i32, DType::u8}) {
    held_.add(Region::activations, dtype, tokens());
  }
}

DryShard::Window DryShard::window(const MixerSettings& mixer) {
  const std::int64_t sinks = mixer.sink == Sink::tokens ? mixer.sink_tokens : 0;
  if (planned_.emplace(mixer.window, sinks).second) {
    for (int tensor = 0; tensor < 3; ++tensor) {
      held_.add(Region::activations, DType::i32, tokens());
    }
  }
  Window window;
  for (int reader = 0; reader < ranks_; ++reader) {
    const ShardRange shard = shard_range(row_tokens_, ranks_, reader);
    if (shard.size() == 0) {
      continue;
    }
    const ShardRange halo{first_visible(mixer, shard.begin), shard.begin};
    const ShardRange pinned{0, std::min(sinks, first_visible(mixer, shard.end - 1))};
    window.lent += intersection(halo, own_).size() + intersection(pinned, own_).size();
    if (shard == own_) {
      window.halo = halo.size();
      window.pinned = pinned.size();
    }
  }
  return window;
}

void DryShard::add_row_keys() {
  if (!std::exchange(has_row_keys_, true)) {
    held_.add(Region::activations, DType::i32, row_tokens_);
  }
}

DryBlock::DryBlock(const ModelConfig& model, const MixerSettings& mixer, DType compute)
    : mixer_(mixer), width_{}, has_qk_norm_(model.qk_norm), compute_(compute) {
  const std::int64_t states = mixer.num_states(model.heads, model.kv_heads);
  width_ = {.hidden = model.hidden,
            .intermediate = model.intermediate,
            .heads = model.heads,
            .query = model.attention_width(),
            .key = model.kv_width(),
            .states = states,
            .feature_key = states * model.head_dim,
            .state = states * model.head_dim * (model.head_dim + 1)};
}

void DryMixerKept::release() {
  for (Held* held : {&projected, &rotated, &v, &near, &rest, &features, &far, &mixed}) {
    held->release();
  }
  is_forgotten = false;
}

void DryBlock::add(Held& held, std::initializer_list<std::int64_t> sizes, Region region) const {
  for (const std::int64_t size : sizes) {
    held.add(region, compute_, size);
  }
}

void DryBlock::add_sums(Held& held,
                        std::initializer_list<std::int64_t> sizes,
                        Region region) const {
  for (const std::int64_t size : sizes) {
    held.add(region, sum_type(compute_), size);
  }
}

DryShard::Window DryBlock::window_of(DryShard& shard) const {
  return mixer_.has_near() ? shard.window(mixer_) : DryShard::Window{};
}

Held DryBlock::heads(DryShard& shard) const {
  Held held(shard.ledger());
  add(held, {shard.tokens() * width_.query});
  return held;
}

void DryBlock::project(DryShard& shard, std::int64_t halo, DryMixerKept& kept) const {
  const std::int64_t tokens = shard.tokens();
  const std::int64_t keys = (halo + tokens) * width_.key;
  add(kept.rotated, {tokens * width_.query, keys});
  add(kept.v, {keys});
  if (has_qk_norm_) {
    add(kept.projected, {tokens * width_.query, tokens * width_.key});
  }
}

void DryBlock::mixer_forward(DryShard& shard, DryMixerKept& kept, Held& incoming) const {
  const std::int64_t tokens = shard.tokens();
  const DryShard::Window window = window_of(shard);
  project(shard, window.halo, kept);
  if (mixer_.has_near()) {
    add(kept.rest, {window.pinned * width_.key, window.pinned * width_.key});
    add(kept.near, {tokens * width_.query});
    add_sums(kept.rest, {tokens * width_.heads});
  }
  if (mixer_.has_far()) {
    add(kept.features, {tokens * width_.query, tokens * width_.feature_key});
    add_sums(kept.rest, {tokens * width_.states, tokens * width_.states});
    if (shard.ranks() > 1 && !incoming) {
      Held summaries(shard.ledger());
      const std::int64_t summary = width_.state + 2 * width_.states;
      add_sums(summaries, {shard.ranks() * summary}, Region::communication);
      add_sums(incoming, {width_.state, width_.states});
    }
    add(kept.far, {tokens * width_.query});
  }
  if (mixer_.has_gate()) {
    add(kept.rest, {tokens * width_.heads});
  }
  if (mixer_.has_near() && mixer_.has_far()) {
    add(kept.mixed, {tokens * width_.query});
  }
}

void DryBlock::forward_ulysses(DryShard& shard, Held& mixed) const {
  const std::int64_t tokens = shard.tokens();
  const std::int64_t row_share = shard.row_tokens() / shard.ranks();
  DryMixerKept local(shard.ledger());
  project(shard, 0, local);
  Held exchanged(shard.ledger());
  const auto pack = [&](std::int64_t width) {
    Held packed(shard.ledger());
    add(packed, {tokens * width}, Region::communication);
  };
  for (const std::int64_t width : {width_.query, width_.key, width_.key}) {
    add(exchanged, {row_share * width}, Region::communication);
    pack(width);
  }
  add(exchanged, {row_share * width_.query});
  add_sums(exchanged, {row_share * width_.heads});
  shard.add_row_keys();
  add(mixed, {tokens * width_.query});
  pack(width_.query);
}

void DryBlock::near_backward(DryShard& shard, Held& rotated) const {
  const DryShard::Window window = window_of(shard);
  const std::int64_t keys = (window.halo + shard.tokens()) * width_.key;
  add(rotated, {shard.tokens() * width_.query, keys, keys});
  Held pinned(shard.ledger());
  add(pinned, {window.pinned * width_.key, window.pinned * width_.key});
  if (window.lent > 0) {  // keys return first, then values
    Held arrived(shard.ledger());
    add(arrived, {window.lent * width_.key}, Region::communication);
  }
}

void DryBlock::far_backward(DryShard& shard, DryMixerKept& kept, Held d_far, Held& rotated) const {
  const std::int64_t tokens = shard.tokens();
  Held gradients(shard.ledger());
  add(gradients, {tokens * width_.query, tokens * width_.feature_key});
  add_sums(gradients, {tokens * width_.states, tokens * width_.states});
  {
    Held d_v(shard.ledger());
    add(d_v, {tokens * width_.key});
    if (shard.ranks() > 1) {
      Held summaries(shard.ledger());
      add_sums(summaries, {shard.ranks() * (width_.state + width_.states)}, Region::communication);
      add_sums(d_v, {width_.state});
    }
    d_far.release();
    kept.far.release();
    kept.v.release();
    if (!rotated) {
      add(rotated, {tokens * width_.query, tokens * width_.key, tokens * width_.key});
    }
  }
  if (sum_type(compute_) != compute_) {
    add(gradients, {tokens * width_.states});
  }
}

void DryBlock::mixer_backward(DryShard& shard,
                              DryMixerKept& kept,
                              Held d_heads,
                              DryGradient wanted) const {
  kept.mixed.release();
  Held d_near(shard.ledger());
  if (mixer_.has_gate()) {
    add(d_near, {shard.tokens() * width_.query});
    Held d_gate(shard.ledger());
    add(d_gate, {shard.tokens() * width_.heads});
  }
  Held rotated(shard.ledger());
  if (mixer_.has_near() && wanted != DryGradient::new_tensors) {
    near_backward(shard, rotated);
  }
  kept.near.release();
  d_near.release();
  if (mixer_.has_far()) {
    far_backward(shard, kept, std::move(d_heads), rotated);
  }
}

void DryBlock::restore(DryShard& shard, DryMixerKept& kept) const {
  if (!std::exchange(kept.is_forgotten, false)) {
    return;
  }
  const std::int64_t tokens = shard.tokens();
  if (has_qk_norm_) {
    kept.rotated.release();
    add(kept.rotated, {tokens * width_.query, (window_of(shard).halo + tokens) * width_.key});
  }
  if (mixer_.has_far()) {
    add(kept.features, {tokens * width_.query, tokens * width_.feature_key});
  }
  if (mixer_.has_near() && mixer_.has_far()) {
    add(kept.mixed, {tokens * width_.query});
  }
}

void DryBlock::fill_mixer(DryShard& shard, DryKept& kept) const {
  if (!kept.normed) {
    add(kept.normed, {shard.tokens() * width_.hidden});
  }
  if (kept.mixer) {
    restore(shard, kept.mixer);
  } else {
    mixer_forward(shard, kept.mixer, kept.incoming);
  }
}

void DryBlock::fill_mlp(DryShard& shard, DryKept& kept) const {
  const std::int64_t wide = shard.tokens() * width_.intermediate;
  if (!kept.middle_normed) {
    add(kept.middle_normed, {shard.tokens() * width_.hidden});
  }
  if (!kept.gate_up) {
    add(kept.gate_up, {wide, wide});
  }
  if (!kept.act) {
    add(kept.act, {wide});
  }
}

void DryBlock::forward(DryShard& shard, Held& x, DryKept& kept, DryAttention attention) const {
  const std::int64_t tokens = shard.tokens();
  kept.input = std::move(x);
  if (attention == DryAttention::ulysses) {
    add(kept.normed, {tokens * width_.hidden});
    forward_ulysses(shard, kept.mixer.mixed);
  } else {
    fill_mixer(shard, kept);
  }
  add(kept.middle, {tokens * width_.hidden});
  fill_mlp(shard, kept);
  x = Held(shard.ledger());
  add(x, {tokens * width_.hidden});
}

void DryBlock::forget(DryShard& shard, DryKept& kept, Recompute recompute) const {
  if (recompute == Recompute::none) {
    return;
  }
  kept.normed.release();
  kept.middle_normed.release();
  kept.act.release();
  if (recompute >= Recompute::mlp) {
    kept.gate_up.release();
  }
  if (recompute >= Recompute::mixer) {
    kept.mixer.release();
  } else {
    DryMixerKept& mixer = kept.mixer;
    const std::int64_t halo = window_of(shard).halo;
    if (has_qk_norm_) {
      mixer.rotated.release();
      if (halo > 0) {
        add(mixer.rotated, {halo * width_.key});
      }
    }
    mixer.features.release();
    mixer.mixed.release();
    mixer.is_forgotten = true;
  }
  if (recompute >= Recompute::block) {
    kept.middle.release();
  }
}

void DryBlock::backward(DryShard& shard, DryKept& kept) const {
  if (!kept.middle) {
    fill_mixer(shard, kept);
    add(kept.middle, {shard.tokens() * width_.hidden});
  }
  fill_mlp(shard, kept);
  for (Held* held : {&kept.act, &kept.gate_up, &kept.middle_normed, &kept.middle}) {
    held->release();
  }
  fill_mixer(shard, kept);
  Held d_heads = heads(shard);
  Held d_normed(shard.ledger());
  add(d_normed, {shard.tokens() * width_.hidden});
  mixer_backward(shard, kept.mixer, std::move(d_heads), DryGradient::input);
  kept.mixer.release();
}

DryDecoder::DryDecoder(Ledger& ledger, const ModelConfig& model, DryWeights& weights, DType compute)
    : ledger_(&ledger),
      model_(&model),
      weights_(&weights),
      compute_(compute),
      inputs_(ledger),
      last_(ledger) {
  for (const MixerSettings& mixer : model.mixers) {
    blocks_.emplace_back(model, mixer, compute);
  }
}

std::int64_t DryDecoder::head_unit() const {
  return model_->tied ? table().embedding_unit() : table().final_unit();
}

Held DryDecoder::hidden(std::int64_t tokens) const {
  Held held(*ledger_);
  held.add(Region::activations, compute_, tokens * model_->hidden);
  return held;
}

Held DryDecoder::rope(std::int64_t tokens) const {
  Held held(*ledger_);
  held.add(Region::activations, sum_type(compute_), tokens * model_->head_dim / 2);
  held.add(Region::activations, sum_type(compute_), tokens * model_->head_dim / 2);
  return held;
}

void DryDecoder::acquire_layer(std::int64_t layer) {
  const bool is_last = layer + 1 == model_->layers;
  weights_->acquire(table().layer_unit(layer),
                    is_last ? table().final_unit() : table().layer_unit(layer + 1));
}

Held DryDecoder::embed(const DryShard& shard) {
  weights_->acquire(table().embedding_unit(), table().layer_unit(0));
  Held x = hidden(shard.tokens());
  weights_->release(table().embedding_unit());
  return x;
}

Held DryDecoder::final_norm(const DryShard& shard) {
  weights_->acquire(table().final_unit());
  Held y = hidden(shard.tokens());
  weights_->release(table().final_unit());
  return y;
}

Held DryDecoder::forward(DryShard& shard,
                         DryAttention attention,
                         const std::function<void(std::int64_t)>& observe) {
  Held x = embed(shard);
  const Held rope_table = rope(shard.tokens());
  for (std::int64_t layer = 0; layer < model_->layers; ++layer) {
    acquire_layer(layer);
    DryKept kept(*ledger_);
    block(layer).forward(shard, x, kept, attention);
    if (observe) {
      observe(layer);
    }
    weights_->release(table().layer_unit(layer));
  }
  return final_norm(shard);
}

Held DryDecoder::forward_kept(DryShard& shard, const RecomputePlan& recompute) {
  inputs_ = rope(shard.tokens());
  Held x = embed(shard);
  for (std::int64_t layer = 0; layer < model_->layers; ++layer) {
    acquire_layer(layer);
    DryKept& kept = kept_.emplace_back(*ledger_);
    block(layer).forward(shard, x, kept, DryAttention::by_tokens);
    block(layer).forget(shard, kept, recompute.of_layer(layer, model_->layers));
    weights_->release(table().layer_unit(layer));
  }
  last_ = std::move(x);
  return final_norm(shard);
}

void DryDecoder::backward(DryShard& shard, DryGradients& gradients) {
  const std::int64_t final_unit = table().final_unit();
  weights_->acquire(final_unit, table().layer_unit(model_->layers - 1));
  gradients.open(final_unit);
  weights_->release(final_unit);
  gradients.close(final_unit);
  last_.release();
  for (std::int64_t layer = model_->layers - 1; layer >= 0; --layer) {
    const std::int64_t unit = table().layer_unit(layer);
    weights_->acquire(unit, layer > 0 ? table().layer_unit(layer - 1) : -1);
    gradients.open(unit);
    block(layer).backward(shard, kept_.back());
    kept_.pop_back();
    weights_->release(unit);
    gradients.close(unit);
  }
  gradients.open(table().embedding_unit());
  gradients.close(table().embedding_unit());
  gradients.finish();
  inputs_.release();
}

}  // namespace bifocal
