// Checkpoints as Hugging Face transformers writes them: hidden states, attention inputs and
// outputs, logits.
#include <cmath>
#include <map>

#include <gtest/gtest.h>

#include "hf/hf_config.h"
#include "hf/model_tensors.h"
#include "hf/safetensors.h"
#include "model/decoder.h"
#include "model/head.h"
#include "model/row_shard.h"
#include "ops/linear.h"
#include "support/compare.h"
#include "support/fill_weights.h"
#include "support/golden.h"

namespace bifocal::test {

namespace {

// transformers computed in float32, so even our float64 differs by its rounding: 1e-5 of the
// largest value, the bound of float32 outputs.
constexpr double kBound = 1e-5;

class GoldenCheckpoint {
 public:
  GoldenCheckpoint(const std::filesystem::path& directory, DType dtype)
      : directory_(directory),
        expected_(directory / "expected.safetensors"),
        context_{stream_, memory_, dtype},
        config_(read_hf_config(directory)),
        table_(config_),
        self_(make_self_communicator()),
        weights_(context_, table_, *self_, {Weights::Placement::replicated, dtype}),
        decoder_(context_, config_, weights_) {
    const SafetensorsReader reader(directory);
    check_model_tensors(reader, table_);
    fill_weights(context_,
                 weights_,
                 [&](const Parameter& parameter, std::int64_t begin, const TensorView& piece) {
                   reader.read(parameter.name, begin, piece);
                 });
  }

  // Both sequences side by side, as documents of one packed row.
  void run_all() {
    const Shape shape = expected_.at("input_ids").shape;
    const Row row = packed_row(shape[0], shape[1]);
    RowShard shard = make_row_shard(context_, row, *self_);
    const Tensor hidden = decoder_.forward(
        shard.layout, shard.ids, [&](std::int64_t layer, const Block::Observation& seen) {
          check_layer(layer, seen);
        });
    check(fmt::format("hidden_states.{}", config_.layers), hidden);
    const Tensor logits =
        memory_.empty(Region::loss, context_.dtype, {row.tokens(), config_.vocabulary});
    Head(context_, config_, weights_).logits(hidden, logits);
    check("logits", logits);
  }

 private:
  Row packed_row(std::int64_t documents, std::int64_t length) const {
    Row row;
    row.ids.resize(static_cast<std::size_t>(documents * length));
    expected_.read("input_ids", 0, {row.ids.data(), DType::i32, {documents * length}});
    for (std::int64_t token = 0; token < documents * length; ++token) {
      const bool last = (token + 1) % length == 0;
      row.start.push_back(static_cast<std::int32_t>(token / length * length));
      row.next.push_back(last ? -1 : row.ids[static_cast<std::size_t>(token + 1)]);
      row.keep.push_back(1);
    }
    return row;
  }

  void check_layer(std::int64_t layer, const Block::Observation& seen) {
    check(fmt::format("hidden_states.{}", layer), seen.residual);
    check(fmt::format("attn_in.{}", layer), seen.input);
    const std::int64_t tokens = seen.input.shape[0];
    const Tensor out = memory_.empty(Region::activations, context_.dtype, {tokens, config_.hidden});
    const ConstTensorView flat = weights_.acquire(table_.layer_unit(layer));
    run(stream_,
        LinearForward{.y = out,
                      .x = seen.heads.reshape({tokens, config_.attention_width()}),
                      .weight = layer_weights(table_, layer, flat).o});
    weights_.release(table_.layer_unit(layer));
    check(fmt::format("attn_out.{}", layer), out);
  }

  void check(const std::string& name, const ConstTensorView& got) {
    std::vector<double> want(static_cast<std::size_t>(expected_.at(name).shape.size()));
    expected_.read(name, 0, {want.data(), DType::f64, {static_cast<std::int64_t>(want.size())}});
    const Difference d = difference(to_doubles(got), want);
    EXPECT_LE(d.largest, kBound * d.scale) << directory_ << " " << name << ": " << d.describe();
  }

  std::filesystem::path directory_;
  SafetensorsReader expected_;
  CpuStream cpu_;
  Stream stream_{&cpu_};
  Memory memory_;
  Context context_;
  ModelConfig config_;
  ParameterTable table_;
  std::unique_ptr<Communicator> self_;
  Weights weights_;
  Decoder decoder_;
};

}  // namespace

TEST(GoldenHuggingFace, CheckpointsGiveTheStatesOfTransformersInDouble) {
  for (const auto& directory : golden_checkpoints()) {
    GoldenCheckpoint(directory, DType::f64).run_all();
  }
}

TEST(GoldenHuggingFace, CheckpointsGiveTheStatesOfTransformersInFloat) {
  for (const auto& directory : golden_checkpoints()) {
    GoldenCheckpoint(directory, DType::f32).run_all();
  }
}

}  // namespace bifocal::test
