// Properties of whole models on one rank: documents are independent, windows meet their limits,
// extremes stay finite.
#include "model/decoder.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "support/compare.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

// One model and what it makes of rows.
class Runner {
 public:
  Runner(const ModelConfig& config, DType dtype)
      : device_(dtype), model_(device_.context(), config, *self_) {}

  TinyModel& model() { return model_; }

  // Final hidden states, [tokens, D].
  Tensor hidden(const Row& row) {
    RowShard shard = make_row_shard(device_.context(), row, *self_);
    return model_.decoder().forward(shard.layout, shard.ids);
  }

 private:
  Device device_;
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  TinyModel model_;
};

std::vector<ModelConfig> all_models() {
  std::vector<ModelConfig> models;
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    models.push_back(tiny_teacher(family));
  }
  for (const NamedMixers& student : tiny_students(models.front())) {
    models.push_back(tiny_student(models.front(), student.mixers));
  }
  return models;
}

TEST(Decoder, ChangingADocumentMovesNoBitOfAnother) {
  const std::vector<std::int64_t> lengths = {1, 30, 2, 17, 9};
  const Row row = packed_row(lengths, 53, 3);
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(describe(config.mixers[0]) + "; " + describe(config.mixers[1]));
    for (const DType dtype : {DType::f32, DType::f64}) {
      Runner runner(config, dtype);
      const Tensor before = runner.hidden(row);
      Row changed = row;
      for (std::size_t token = 33; token < 50; ++token) {
        changed.ids[token] = (changed.ids[token] + 7) % 53;
      }
      const Tensor after = runner.hidden(changed);
      EXPECT_SAME_BITS(after.rows(0, 33), before.rows(0, 33));
      EXPECT_SAME_BITS(after.rows(50, 59), before.rows(50, 59));
      EXPECT_GT(max_abs_error(after.rows(33, 50), before.rows(33, 50)), 0.1);
    }
  }
}

// Blocks and chunks fall on other tokens when a document stands alone: sums of some dozen terms in
// another order.
TEST(Decoder, ADocumentOfAPackedRowEqualsItAlone) {
  const std::vector<std::int64_t> lengths = {1, 30, 2, 17, 1, 70};
  const Row row = packed_row(lengths, 53, 3);
  for (const ModelConfig& config : all_models()) {
    Runner runner(config, DType::f64);
    const Tensor packed = runner.hidden(row);
    std::int64_t begin = 0;
    for (const std::int64_t length : lengths) {
      Row alone = packed_row({length}, 53, 3);
      std::copy_n(row.ids.begin() + begin, length, alone.ids.begin());
      EXPECT_CLOSE(runner.hidden(alone), packed.rows(begin, begin + length), 1e-12);
      begin += length;
    }
  }
}

TEST(Decoder, LaterTokensMoveNoEarlierOne) {
  const Row row = packed_row({60}, 53, 4);
  Row changed = row;
  changed.ids[40] = (changed.ids[40] + 1) % 53;
  for (const ModelConfig& config : all_models()) {
    Runner runner(config, DType::f64);
    const Tensor before = runner.hidden(row);
    const Tensor after = runner.hidden(changed);
    EXPECT_SAME_BITS(after.rows(0, 40), before.rows(0, 40));
  }
}

TEST(Decoder, AWindowOfTheWholeRowIsFullAttention) {
  const Row row = packed_row({5, 40, 3}, 53, 5);
  const ModelConfig teacher = tiny_teacher();
  Runner full_runner(teacher, DType::f32);
  const Tensor full = full_runner.hidden(row);
  for (const std::int64_t window : {40, 48, 1000}) {
    const auto student = tiny_student(teacher, std::vector<MixerSettings>(3, {.window = window}));
    EXPECT_SAME_BITS(Runner(student, DType::f32).hidden(row), full);
  }
}

TEST(Decoder, AWindowOfOneSeesNoOtherToken) {
  Row row = packed_row({20}, 53, 6);
  const auto student = tiny_student(tiny_teacher(), std::vector<MixerSettings>(3, {.window = 1}));
  Runner runner(student, DType::f64);
  std::fill(row.ids.begin(), row.ids.end(), 9);
  const Tensor hidden = runner.hidden(row);
  // Equal tokens at other positions: rope turns q and k alike and one key leaves no choice.
  // Products of matrices may round rows at a tile's edge otherwise.
  for (std::int64_t token = 1; token < 20; ++token) {
    EXPECT_CLOSE(hidden.rows(token, token + 1), hidden.rows(0, 1), 1e-13);
  }
}

TEST(Decoder, DocumentsShorterThanTheWindowDoNotDependOnIt) {
  const Row row = packed_row({1, 7, 8, 3, 1}, 53, 7);
  for (const MixerSettings& base :
       {MixerSettings{.window = 8, .sink = Sink::learned, .states = States::kv},
        MixerSettings{.window = 8, .sink = Sink::tokens, .sink_tokens = 4}}) {
    MixerSettings wide = base;
    wide.window = 500;
    const ModelConfig teacher = tiny_teacher();
    const auto hidden = [&](const MixerSettings& mixer) {
      return to_doubles(
          Runner(tiny_student(teacher, std::vector<MixerSettings>(3, mixer)), DType::f64)
              .hidden(row));
    };
    EXPECT_EQ(max_abs_error(hidden(base), hidden(wide)), 0.0);
  }
}

TEST(Decoder, TakesARowWithoutTokens) {
  for (const ModelConfig& config : all_models()) {
    EXPECT_EQ(Runner(config, DType::f32).hidden(Row{}).shape(), (Shape{0, config.hidden}));
  }
}

TEST(Decoder, WhatIsComputedAgainChangesNoBit) {
  const Row row = packed_row({20, 1, 13}, 53, 8);
  for (const ModelConfig& config : all_models()) {
    Device device(DType::f32);
    const auto self = make_self_communicator();
    TinyModel model(device.context(), config, *self);
    RowShard shard = make_row_shard(device.context(), row, *self);
    const Tensor want = model.decoder().forward(shard.layout, shard.ids);
    NamedValues gradients;  // of the plan that keeps everything
    for (const RecomputePlan& recompute : recompute_plans(config.layers)) {
      DecoderKept kept;
      const Tensor hidden = model.decoder().forward_kept(shard.layout, shard.ids, recompute, kept);
      EXPECT_SAME_BITS(hidden, want);
      Gradients sums(device.context(), model.table(), *self);
      sums.open(model.table().embedding_unit());
      model.decoder().backward(shard.layout, kept, hidden, sums);
      const NamedValues found = whole_gradients(
          model.table(), sums, *self, std::vector<double>(model.table().units().size(), 1.0));
      if (gradients.empty()) {
        gradients = found;
        EXPECT_GT(largest(gradients), 0.0);
      }
      EXPECT_EQ(found, gradients) << name_of(recompute.level) << " " << recompute.richer_layers;
    }
  }
}

TEST(Decoder, ObserverSeesEveryLayerOfWhatTheMixerReadsAndMakes) {
  const Row row = packed_row({12, 5}, 53, 9);
  Device device(DType::f32);
  const auto self = make_self_communicator();
  const ModelConfig config = tiny_teacher();
  TinyModel model(device.context(), config, *self);
  RowShard shard = make_row_shard(device.context(), row, *self);
  std::vector<std::int64_t> layers;
  model.decoder().forward(
      shard.layout, shard.ids, [&](std::int64_t layer, const Block::Observation& seen) {
        layers.push_back(layer);
        EXPECT_EQ(seen.input.shape, (Shape{17, config.hidden}));
        EXPECT_EQ(seen.heads.shape, (Shape{17, config.heads, config.head_dim}));
      });
  EXPECT_EQ(layers, (std::vector<std::int64_t>{0, 1, 2}));
}

// Gates that open, close, remember and forget altogether, in all layers, forward and backward.
TEST(Decoder, ExtremeGatesGiveNoNan) {
  const ModelConfig teacher_config = tiny_teacher();
  for (const NamedMixers& student_mixers : tiny_students(teacher_config)) {
    for (const double extreme : {1e3, 1e5}) {
      SCOPED_TRACE(student_mixers.name);
      Device device(DType::f32);
      const Mesh mesh(make_self_communicator(), {.data = 1, .sequence = 1});
      TinyModel teacher(device.context(), teacher_config, mesh.world());
      TinyModel student(
          device.context(), tiny_student(teacher_config, student_mixers.mixers), mesh.world());
      for (const Parameter& parameter : student.table().parameters()) {
        const bool is_gate =
            parameter.name.find("_gate.") != std::string::npos && parameter.is_new();
        const bool is_sink = parameter.name.ends_with("mixer.sink");
        if (!is_gate && !is_sink) {
          continue;
        }
        student.change(parameter.name, [&](double value, std::int64_t) { return extreme * value; });
      }
      const auto rows =
          stage_rows([](std::int64_t position) { return random_row(position, 60, 53); }, 2, 1);
      LogitStage distill(device.context(),
                         student.decoder(),
                         &teacher.decoder(),
                         mesh,
                         TeacherPlacement::look_ahead,
                         Recompute::none,
                         {.chunk = 16},
                         rows);
      AlignStage align(device.context(),
                       student.decoder(),
                       teacher.decoder(),
                       mesh,
                       TeacherPlacement::look_ahead,
                       AlignTrainable::mixer,
                       rows);
      for (Stage* stage : std::initializer_list<Stage*>{&distill, &align}) {
        Gradients gradients(device.context(), student.table(), mesh.world());
        const StepResult result = stage->run_step(0, gradients);
        EXPECT_TRUE(std::isfinite(result.loss));
        for (const double sum : result.unit_squares) {
          EXPECT_TRUE(std::isfinite(sum));
        }
      }
    }
  }
}

}  // namespace

}  // namespace bifocal::test
