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

// What a layer keeps: its input, the state that entered the shard, and all that it can compute
// again.
struct DryKept {
  explicit DryKept(Ledger& ledger) : input(ledger), incoming(ledger), rest(ledger) {}

  Held input, incoming, rest;
};

// A layer and its mixer (model/block.h, model/mixer.h). model must outlive it.
class DryBlock {
 public:
  DryBlock(const ModelConfig& model, const MixerSettings& mixer, DType compute);

  // x is replaced by the output.
  void forward(DryShard& shard, Held& x, DryKept& kept, DryAttention attention) const;
  void backward(DryShard& shard, DryKept& kept) const;

  void mixer_forward(DryShard& shard, Held& kept, Held& incoming) const;
  void mixer_backward(DryShard& shard, DryGradient wanted) const;

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
  DryShard::Window window_of(DryShard& shard) const;
  void project(DryShard& shard, std::int64_t halo, Held& kept) const;
  void near_backward(DryShard& shard) const;
  void far_backward(DryShard& shard) const;
  void forward_ulysses(DryShard& shard, Held& kept) const;

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
  Held forward_kept(DryShard& shard, bool recomputes_blocks);
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
