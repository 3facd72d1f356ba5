// One golden mixer on any number of ranks.
#include <gtest/gtest.h>

#include "model/mixer.h"
#include "ops/linear.h"
#include "support/compare.h"
#include "support/device_values.h"
#include "support/golden.h"
#include "support/golden_checks.h"

namespace bifocal::test {

namespace {

ModelConfig mixer_model(const GoldenFile& file) {
  ModelConfig config;
  config.hidden = file.shape("in/x")[1];
  config.heads = static_cast<std::int64_t>(file.number("H"));
  config.kv_heads = static_cast<std::int64_t>(file.number("G"));
  config.head_dim = static_cast<std::int64_t>(file.number("d"));
  config.norm_eps = file.number("eps");
  config.rope_theta = file.number("theta");
  config.qk_norm = file.number("qk_norm") != 0.0;
  config.qkv_bias = file.has("params/q_bias");
  return config;
}

// The fields by their names in golden files.
template <class View>
std::vector<std::pair<std::string, View LayerTensors<View>::*>> fields() {
  using T = LayerTensors<View>;
  return {{"q_proj", &T::q},
          {"k_proj", &T::k},
          {"v_proj", &T::v},
          {"o_proj", &T::o},
          {"q_bias", &T::q_bias},
          {"k_bias", &T::k_bias},
          {"v_bias", &T::v_bias},
          {"q_norm", &T::q_norm},
          {"k_norm", &T::k_norm},
          {"sink", &T::sink},
          {"feature_q", &T::feature_q},
          {"feature_k", &T::feature_k},
          {"i_gate.weight", &T::i_gate},
          {"f_gate.weight", &T::f_gate},
          {"f_gate.bias", &T::f_gate_bias},
          {"o_gate.weight", &T::o_gate},
          {"o_gate.bias", &T::o_gate_bias}};
}

class MixerCheck {
 public:
  MixerCheck(const std::filesystem::path& path,
             DType dtype,
             Communicator& group,
             Backend& backend,
             GoldenValues* kept = nullptr)
      : path_(path),
        file_(path),
        tolerance_(golden_tolerance(dtype, path)),
        group_(group),
        kept_values_(kept),
        context_{backend.stream(), backend.memory(), dtype},
        layout_(file_.starts(), group, context_) {}

  void run_all() {
    const ModelConfig config = mixer_model(file_);
    LayerWeights weights;
    LayerGradients gradients;
    for (const auto& [name, field] : fields<ConstTensorView>()) {
      if (file_.has("params/" + name)) weights.*field = keep(on_device("params/" + name));
    }
    for (const auto& [name, field] : fields<TensorView>()) {
      if (!file_.has("params/" + name)) continue;
      gradients.*field = keep(context_.memory.zeros(
          Region::gradients, context_.sum_type(), file_.shape("params/" + name)));
    }
    Mixer mixer(context_, config, golden_mixer_settings(file_));
    const Rope rope = make_rope(context_, config, layout_.positions());
    const TensorView x = own_rows("in/x");
    const MixerInputs in{weights, layout_, rope, x};
    IncomingState incoming;
    MixerKept kept = mixer.forward(in, incoming);
    check_rows("out/heads", kept.heads());

    const std::int64_t tokens = layout_.tokens();
    const Shape flat{tokens, config.attention_width()};
    const Tensor y =
        context_.memory.empty(Region::activations, context_.dtype, {tokens, config.hidden});
    run(context_.stream,
        LinearForward{.y = y, .x = kept.heads().reshape(flat), .weight = weights.o});
    check_rows("out/y", y);
    if (file_.has("out/state_C")) check_final_state(config, kept, incoming);

    const TensorView d_y = own_rows("in/dy");
    Tensor d_heads = context_.memory.empty(Region::activations, context_.dtype, kept.heads().shape);
    const Tensor d_x = context_.memory.empty(Region::activations, context_.dtype, x.shape);
    run(context_.stream,
        LinearBackwardWeight{.d_weight = gradients.o, .d_y = d_y, .x = kept.heads().reshape(flat)});
    run(context_.stream,
        LinearBackwardInput{.d_x = d_heads.reshape(flat), .d_y = d_y, .weight = weights.o});
    mixer.backward(in, kept, incoming, std::move(d_heads), {.gradients = gradients, .d_x = d_x});
    check_rows("grad/x", d_x);
    for (const auto& [name, field] : fields<TensorView>()) {
      if (!file_.has("grad/" + name)) continue;
      group_.all_reduce_sum(gradients.*field);
      compare("grad/" + name, values_of(context_, gradients.*field), file_.values("grad/" + name));
    }
  }

 private:
  TensorView keep(Tensor tensor) {
    kept_.push_back(std::move(tensor));
    return kept_.back();
  }

  Tensor on_device(const std::string& dataset) {
    return to_device(context_, file_.tensor(host_, DType::f64, dataset), context_.dtype);
  }

  TensorView own_rows(const std::string& dataset) {
    return keep(on_device(dataset)).rows(layout_.begin(), layout_.begin() + layout_.tokens());
  }

  void compare(const std::string& name,
               const std::vector<double>& got,
               const std::vector<double>& want) const {
    if (kept_values_ != nullptr) {
      (*kept_values_)[name] = {got, want};
      return;
    }
    const Difference d = difference(got, want);
    double bound = tolerance_.output * d.scale;
    if (name.starts_with("grad/")) {
      bound = tolerance_.gradient * std::max(d.scale, 0.01 * file_.largest("grad"));
    }
    EXPECT_LE(d.largest, bound) << path_.filename() << " " << name << " rank " << group_.rank()
                                << " of " << group_.size() << ": " << d.describe();
  }

  void check_rows(const std::string& name, const ConstTensorView& got) {
    const std::vector<double>& all = file_.values(name);
    const std::int64_t width = file_.shape(name).size() / layout_.row_tokens();
    const auto first = all.begin() + layout_.begin() * width;
    compare(name,
            values_of(context_, got),
            std::vector<double>(first, first + layout_.tokens() * width));
  }

  // The state that leaves the last rank; C and n at the scale exp(m).
  void check_final_state(const ModelConfig& config,
                         const MixerKept& kept,
                         const IncomingState& incoming) {
    const std::int64_t states = kept.feature_k.shape()[1];
    const std::int64_t dim = config.head_dim;
    const MlstmState state{
        keep(context_.memory.empty(Region::activations, context_.sum_type(), {states, dim, dim})),
        keep(context_.memory.empty(Region::activations, context_.sum_type(), {states, dim})),
        keep(context_.memory.empty(Region::activations, context_.sum_type(), {states}))};
    const Tensor h = context_.memory.empty(Region::activations, context_.dtype, kept.far.shape());
    const std::int64_t halo = kept.v.shape()[0] - layout_.tokens();
    MlstmInputs inputs{.q = kept.feature_q,
                       .k = kept.feature_k,
                       .v = kept.v.rows(halo, halo + layout_.tokens()),
                       .i_gate = kept.i_gate,
                       .f_gate = kept.f_gate,
                       .starts = layout_.starts()};
    if (incoming) inputs.initial = incoming.view();
    run(context_.stream, MlstmForward{.h = h, .final = state, .inputs = inputs});
    if (group_.rank() + 1 != group_.size()) return;
    compare("out/state_C", values_of(context_, state.c), file_.values("out/state_C"));
    compare("out/state_n", values_of(context_, state.n), file_.values("out/state_n"));
    compare("out/state_m", values_of(context_, state.m), file_.values("out/state_m"));
  }

  std::filesystem::path path_;
  GoldenFile file_;
  GoldenTolerance tolerance_;
  Communicator& group_;
  GoldenValues* kept_values_;  // null: values are judged
  Memory host_;
  Context context_;
  RowLayout layout_;
  std::vector<Tensor> kept_;
};

}  // namespace

void check_golden_mixer(const std::filesystem::path& path,
                        DType dtype,
                        Communicator& group,
                        Backend& backend) {
  MixerCheck(path, dtype, group, backend).run_all();
}

GoldenValues golden_mixer_values(const std::filesystem::path& path,
                                 DType dtype,
                                 Communicator& group,
                                 Backend& backend) {
  GoldenValues values;
  MixerCheck(path, dtype, group, backend, &values).run_all();
  return values;
}

void check_golden_mixer(const std::filesystem::path& path, DType dtype, Communicator& group) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  check_golden_mixer(path, dtype, group, *cpu);
}

}  // namespace bifocal::test
