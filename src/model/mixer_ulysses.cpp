// Full attention with heads cut over the ranks of a row (DeepSpeed-Ulysses, Jacobs et al., 2023).
#include "model/mixer.h"
#include "ops/transfer.h"

namespace bifocal {

namespace {

// Tokens of one shard with all heads <-> tokens of the whole row with this rank's heads.
class HeadExchange {
 public:
  HeadExchange(Context& context, RowLayout& layout) : context_(context), layout_(layout) {}

  // local [tokens, heads, dim] -> [row tokens, heads / ranks, dim].
  Tensor to_heads(const TensorView& local) {
    const std::int64_t heads = local.shape[1] / ranks();
    const std::int64_t dim = local.shape[2];
    Tensor whole = make({layout_.row_tokens(), heads, dim}, local.dtype);
    std::vector<Tensor> packed;
    std::vector<RankMessage> sends;
    std::vector<RankMessage> receives;
    for (int peer = 0; peer < ranks(); ++peer) {
      packed.push_back(make({layout_.tokens(), heads, dim}, local.dtype));
      run(context_.stream,
          CopyHeads{.y = packed.back(), .x = local, .x_first = peer * heads, .count = heads});
      sends.push_back({peer, packed.back()});
      const auto [begin, end] = layout_.shard(peer);
      receives.push_back({peer, whole.rows(begin, end)});
    }
    layout_.group().exchange(sends, receives);
    return whole;
  }

  // whole [row tokens, heads / ranks, dim] -> local [tokens, heads, dim].
  void to_tokens(const TensorView& whole, const TensorView& local) {
    const std::int64_t heads = whole.shape[1];
    std::vector<Tensor> packed;
    std::vector<RankMessage> sends;
    std::vector<RankMessage> receives;
    for (int peer = 0; peer < ranks(); ++peer) {
      const auto [begin, end] = layout_.shard(peer);
      sends.push_back({peer, whole.rows(begin, end)});
      packed.push_back(make({layout_.tokens(), heads, whole.shape[2]}, whole.dtype));
      receives.push_back({peer, packed.back()});
    }
    layout_.group().exchange(sends, receives);
    for (int peer = 0; peer < ranks(); ++peer) {
      run(context_.stream,
          CopyHeads{.y = local,
                    .x = packed[static_cast<std::size_t>(peer)],
                    .y_first = peer * heads,
                    .count = heads});
    }
  }

 private:
  int ranks() const { return layout_.group().size(); }

  Tensor make(const Shape& shape, DType dtype) {
    return context_.memory.empty(Region::communication, dtype, shape);
  }

  Context& context_;
  RowLayout& layout_;
};

}  // namespace

Tensor Mixer::forward_ulysses(const MixerInputs& in) {
  BIFOCAL_REQUIRE(
      config_.kv_heads % in.layout.group().size() == 0,
      "[teacher] ulysses placement wanted a number of sequence ranks that divides the {} "
      "key-value heads, got {}: set teacher.placement = \"look-ahead\"",
      config_.kv_heads,
      in.layout.group().size());
  MixerKept kept;
  project(in, 0, kept);
  HeadExchange exchange(context_, in.layout);
  const Tensor q = exchange.to_heads(kept.q);
  const Tensor k = exchange.to_heads(kept.k);
  const Tensor v = exchange.to_heads(kept.v);
  const Tensor out = activation(q.shape());
  const Tensor lse = sums({q.shape()[0], q.shape()[1]});
  AttentionInputs inputs{.q = q, .k = k, .v = v, .key_begin = in.layout.whole_row_key_begin()};
  run(context_.stream, SlidingAttentionForward{.out = out, .lse = lse, .inputs = inputs});
  Tensor heads = activation({in.layout.tokens(), config_.heads, config_.head_dim});
  exchange.to_tokens(out, heads);
  return heads;
}

}  // namespace bifocal
