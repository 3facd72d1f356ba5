// A decoder without its arithmetic: takes from a ledger what model/ takes from Memory, in the same
// order.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <set>
#include <utility>
#include <vector>

#include "config/model_config.h"
#include "parallel/shard.h"
#include "plan/memory_ledger.h"
#include "plan/recompute.h"

namespace bifocal {

// One rank's shard of a row that is one document (model/row_shard.h, model/row_layout.h).
class DryShard {
 public:
  DryShard(Ledger& ledger, std::int64_t row_tokens, std::int64_t ranks, std::int64_t rank);

  Ledger& ledger() const { return *ledger_; }

  std::int64_t row_tokens() const { return row_tokens_; }

  std::int64_t tokens() const { return own_.size(); }

  std::int64_t ranks() const { return ranks_; }

  // Tokens that a mixer's windows move.
  struct Window {
    std::int64_t halo = 0;    // before the shard, read by it
    std::int64_t pinned = 0;  // sink tokens that it reads
    std::int64_t lent = 0;  // its own that ranks read as halo or sink tokens, once for each reader
  };

  Window window(const MixerSettings& mixer);

  // The key ranges of the whole row.
  void add_row_keys();

 private:
  Ledger* ledger_;
  std::int64_t row_tokens_;
  int ranks_;
  ShardRange own_;
  Held held_;
  std::set<std::pair<std::int64_t, std::int64_t>> planned_;
  bool has_row_keys_ = false;
};

enum class DryAttention : std::uint8_t { by_tokens, ulysses };

// What a mixer's backward pass is asked for.
enum class DryGradient : std::uint8_t { new_tensors, projections, input };

// MixerKept: what is freed together stands together.
struct DryMixerKept {
  explicit DryMixerKept(Ledger& ledger)
      : projected(ledger),
        rotated(ledger),
        v(ledger),
        near(ledger),
        rest(ledger),
        features(ledger),
        far(ledger),
        mixed(ledger) {}

  explicit operator bool() const { return static_cast<bool>(v); }

  void release();

  Held projected;  // q and k before their norms
  Held rotated;    // q and k, or the halo of k while they are forgotten
  Held v, near;
  Held rest;  // pinned keys and values, log-sum-exps, gates
  Held features, far, mixed;
  bool is_forgotten = false;
};

// BlockKept.
struct DryKept {
  explicit DryKept(Ledger& ledger)
      : input(ledger),
        incoming(ledger),
        normed(ledger),
        middle(ledger),
        middle_normed(ledger),
        gate_up(ledger),
        act(ledger),
        mixer(ledger) {}

  Held input, incoming, normed, middle, middle_normed, gate_up, act;
  DryMixerKept mixer;
};

// A layer and its mixer (model/block.h, model/mixer.h). model must outlive it.
class DryBlock {
 public:
  DryBlock(const ModelConfig& model, const MixerSettings& mixer, DType compute);

  // x is replaced by the output.
  void forward(DryShard& shard, Held& x, DryKept& kept, DryAttention attention) const;
  void forget(DryShard& shard, DryKept& kept, Recompute recompute) const;
  void backward(DryShard& shard, DryKept& kept) const;

  void mixer_forward(DryShard& shard, DryMixerKept& kept, Held& incoming) const;
  // d_heads: as model/mixer.h.
  void mixer_backward(DryShard& shard, DryMixerKept& kept, Held d_heads, DryGradient wanted) const;

  Held heads(DryShard& shard) const;  // [tokens, H, d]

 private:
  // Elements per token, and of the state of a whole shard.
  struct Widths {
    std::int64_t hidden, intermediate, heads;
    std::int64_t query, key;           // H d, G d
    std::int64_t states, feature_key;  // S, S d
    std::int64_t state;                // C and n: S d (d + 1)
  };

  void add(Held& held,
           std::initializer_list<std::int64_t> sizes,
           Region region = Region::activations) const;
  // The same in the sum type.
  void add_sums(Held& held,
                std::initializer_list<std::int64_t> sizes,
                Region region = Region::activations) const;
  DryShard::Window window_of(DryShard& shard) const;
  void fill_mixer(DryShard& shard, DryKept& kept) const;
  void fill_mlp(DryShard& shard, DryKept& kept) const;
  void project(DryShard& shard, std::int64_t halo, DryMixerKept& kept) const;
  void restore(DryShard& shard, DryMixerKept& kept) const;
  void near_backward(DryShard& shard, Held& rotated) const;
  void far_backward(DryShard& shard, DryMixerKept& kept, Held d_far, Held& rotated) const;
  void forward_ulysses(DryShard& shard, Held& mixed) const;

  MixerSettings mixer_;
  Widths width_;
  bool has_qk_norm_;
  DType compute_;
};

// model/decoder.h. model and weights must outlive it.
class DryDecoder {
 public:
  DryDecoder(Ledger& ledger, const ModelConfig& model, DryWeights& weights, DType compute);

  DryWeights& weights() const { return *weights_; }

  const DryBlock& block(std::int64_t layer) const {
    return blocks_[static_cast<std::size_t>(layer)];
  }

  // The unit that holds the head's weight.
  std::int64_t head_unit() const;

  Held hidden(std::int64_t tokens) const;  // [tokens, D]
  Held rope(std::int64_t tokens) const;

  // Final hidden states. observe(layer) runs while the layer's tensors live; it may be empty.
  Held forward(DryShard& shard,
               DryAttention attention,
               const std::function<void(std::int64_t)>& observe);
  // The same, leaving what backward() takes.
  Held forward_kept(DryShard& shard, const RecomputePlan& recompute);
  void backward(DryShard& shard, DryGradients& gradients);

 private:
  const ParameterTable& table() const { return weights_->table(); }

  void acquire_layer(std::int64_t layer);
  Held embed(const DryShard& shard);
  Held final_norm(const DryShard& shard);

  Ledger* ledger_;
  const ModelConfig* model_;
  DryWeights* weights_;
  DType compute_;
  std::vector<DryBlock> blocks_;
  Held inputs_;  // ids and rope
  std::vector<DryKept> kept_;
  Held last_;
};

}  // namespace bifocal
