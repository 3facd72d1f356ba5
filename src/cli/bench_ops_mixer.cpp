// Cases of `bifocal bench ops` that a mixer is made of.
#include <fmt/format.h>

#include "cli/bench_ops.h"
#include "plan/step_flop.h"

namespace bifocal {

void OpsBench::attention() {
  const std::string window = fmt::format("swa{}_", options_.window);
  const bool both = wants(window + "forward_backward");
  if (!wants("teacher_attention") && !wants(window + "forward") && !both) {
    return;
  }
  const Tensor q = random({tokens_, model_.heads, model_.head_dim});
  const Tensor k = random({tokens_, model_.kv_heads, model_.head_dim});
  const Tensor v = random(k.shape());
  const Tensor full = key_begin(0);
  const Tensor near = key_begin(options_.window);
  const Tensor sink = random({model_.heads});
  const Tensor out = empty(type(), q.shape());
  const Tensor lse = empty(sum_type(), {tokens_, model_.heads});
  const SlidingAttentionForward whole{
      .out = out, .lse = lse, .inputs = {.q = q, .k = k, .v = v, .key_begin = full}};
  time("teacher_attention", {cost(whole, visible_pairs(documents_, 0))}, [&] {
    run(context_.stream, whole);
  });
  const SlidingAttentionForward forward{
      .out = out, .lse = lse, .inputs = {.q = q, .k = k, .v = v, .key_begin = near, .sink = sink}};
  const double pairs = visible_pairs(documents_, options_.window);
  time(window + "forward", {cost(forward, pairs)}, [&] { run(context_.stream, forward); });
  if (!both) {
    return;
  }
  const Tensor d_out = random(q.shape());
  const Tensor d_q = empty(type(), q.shape());
  const Tensor d_k = empty(type(), k.shape());
  const Tensor d_v = empty(type(), k.shape());
  const Tensor d_sink = zeros(Region::gradients, sum_type(), sink.shape());
  const SlidingAttentionBackward backward{.d_q = d_q,
                                          .d_k = d_k,
                                          .d_v = d_v,
                                          .d_sink = d_sink,
                                          .d_out = d_out,
                                          .out = out,
                                          .lse = lse,
                                          .inputs = forward.inputs};
  time(window + "forward_backward", {cost(forward, pairs), cost(backward, pairs)}, [&] {
    run(context_.stream, forward);
    run(context_.stream, backward);
  });
}

void OpsBench::mlstm() {
  if (!wants("mlstm_forward") && !wants("mlstm_forward_backward")) {
    return;
  }
  // Features are softmaxes: positive and of sum 1, which exp(normal) / sum is.
  const auto feature_rows = [&](std::int64_t heads) {
    const Tensor x = random({tokens_, heads, model_.head_dim});
    const Tensor weight = random({heads, model_.head_dim, model_.head_dim}, 0.1);
    Tensor y = empty(type(), x.shape());
    run(context_.stream, FeatureMapForward{.y = y, .x = x, .weight = weight});
    return y;
  };
  const std::int64_t states = model_.kv_heads;
  const Tensor q = feature_rows(model_.heads);
  const Tensor k = feature_rows(states);
  const Tensor v = random({tokens_, states, model_.head_dim});
  const Tensor i_gate = random_of(sum_type(), {tokens_, states}, 1.0);
  const Tensor f_gate = random_of(sum_type(), {tokens_, states}, 1.0, 4.0);
  const Tensor first = starts();
  const Tensor h = empty(type(), q.shape());
  const MlstmForward forward{
      .h = h,
      .inputs = {.q = q, .k = k, .v = v, .i_gate = i_gate, .f_gate = f_gate, .starts = first}};
  time("mlstm_forward", {cost(forward, kCountedChunk)}, [&] { run(context_.stream, forward); });
  if (!wants("mlstm_forward_backward")) {
    return;
  }
  const Tensor d_h = random(q.shape());
  const Tensor d_q = empty(type(), q.shape());
  const Tensor d_k = empty(type(), k.shape());
  const Tensor d_v = empty(type(), v.shape());
  const Tensor d_i = empty(sum_type(), i_gate.shape());
  const Tensor d_f = empty(sum_type(), f_gate.shape());
  const MlstmBackward backward{.d_q = d_q,
                               .d_k = d_k,
                               .d_v = d_v,
                               .d_i_gate = d_i,
                               .d_f_gate = d_f,
                               .d_h = d_h,
                               .h = h,
                               .inputs = forward.inputs};
  time(
      "mlstm_forward_backward", {cost(forward, kCountedChunk), cost(backward, kCountedChunk)}, [&] {
        run(context_.stream, forward);
        run(context_.stream, backward);
      });
}

// Queries and keys, as a layer has them.
void OpsBench::features() {
  if (!wants("feature_maps") && !wants("feature_maps_backward")) {
    return;
  }

  struct Side {
    Tensor x, weight, y, d_y, d_x, d_weight;
  };

  std::vector<Side> sides;
  for (const std::int64_t heads : {model_.heads, model_.kv_heads}) {
    const Shape shape{tokens_, heads, model_.head_dim};
    const Shape square{heads, model_.head_dim, model_.head_dim};
    sides.push_back({random(shape),
                     random(square, 0.1),
                     empty(type(), shape),
                     random(shape),
                     zeros(Region::activations, type(), shape),
                     zeros(Region::gradients, sum_type(), square)});
  }
  const auto forward = [](const Side& s) {
    return FeatureMapForward{.y = s.y, .x = s.x, .weight = s.weight};
  };
  const auto backward = [](const Side& s) {
    return FeatureMapBackward{
        .d_x = s.d_x, .d_weight = s.d_weight, .d_y = s.d_y, .y = s.y, .x = s.x, .weight = s.weight};
  };
  time("feature_maps", {cost(forward(sides[0])), cost(forward(sides[1]))}, [&] {
    run(context_.stream, forward(sides[0]));
    run(context_.stream, forward(sides[1]));
  });
  for (const Side& side : sides) {
    run(context_.stream, forward(side));
  }
  time("feature_maps_backward", {cost(backward(sides[0])), cost(backward(sides[1]))}, [&] {
    run(context_.stream, backward(sides[0]));
    run(context_.stream, backward(sides[1]));
  });
}

void OpsBench::rope() {
  if (!wants("rope")) {
    return;
  }
  const Tensor x = random({tokens_, model_.heads, model_.head_dim});
  const Tensor cos = random_of(sum_type(), {tokens_, model_.head_dim / 2}, 0.5);
  const Tensor sin = random_of(sum_type(), {tokens_, model_.head_dim / 2}, 0.5);
  time_op("rope", RopeRotate{.x = x, .cos = cos, .sin = sin});
}

void OpsBench::gate() {
  if (!wants("gate") && !wants("gate_backward")) {
    return;
  }
  const Tensor far = random({tokens_, model_.heads, model_.head_dim});
  const Tensor near = random(far.shape());
  const Tensor weight = random({tokens_, model_.heads});
  const Tensor y = empty(type(), far.shape());
  time_op("gate", BifocalGateForward{.y = y, .far = far, .near = near, .gate = weight});
  const Tensor d_y = random(far.shape());
  const Tensor d_near = empty(type(), far.shape());
  const Tensor d_gate = empty(type(), weight.shape());
  time_op("gate_backward",
          BifocalGateBackward{.d_far = y,
                              .d_near = d_near,
                              .d_gate = d_gate,
                              .d_y = d_y,
                              .far = far,
                              .near = near,
                              .gate = weight});
}

}  // namespace bifocal
