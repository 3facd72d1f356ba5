// Runs real training steps of a tiny random model and holds the forecast against Memory's account.
#pragma once

#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "core/random.h"
#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "evaluate/validation.h"
#include "ops/fill.h"
#include "parallel/backend.h"
#include "plan/memory_forecast.h"
#include "support/fill_weights.h"
#include "train/optimizer.h"

namespace bifocal::test {

// What a run needs; every rank uses the same.
struct AccountCase {
  std::string name;
  StageKind stage = StageKind::distill;
  RunConfig config;
  ModelConfig model;  // the student; the teacher is the same with full attention
  TeacherPlacement placement = TeacherPlacement::look_ahead;
  DType teacher_storage = DType::f32;
};

inline ModelConfig account_model(bool tied) {
  ModelConfig model;
  model.vocabulary = 320;
  model.hidden = 48;
  model.intermediate = 112;
  model.layers = 4;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 16;
  model.qk_norm = tied;
  model.tied = tied;
  model.max_position = 4096;
  model.mixers.assign(4, MixerSettings{});
  return model;
}

inline RunConfig account_config() {
  RunConfig config;
  config.data.row_tokens = 300;
  config.data.rows_per_step = 1;
  config.memory.logit_chunk = 64;
  return config;
}

class AccountRun {
 public:
  // The world is of the backend, whose memory nothing else has used.
  AccountRun(const AccountCase& account, std::unique_ptr<Communicator> world, Backend& backend)
      : case_(account),
        dtype_(compute_type(account.config)),
        mesh_(std::move(world),
              {.data = account.config.mesh.data, .sequence = account.config.mesh.sequence}),
        host_memory_(backend.host_memory()),
        memory_(backend.memory()),
        context_{backend.stream(), memory_, dtype_},
        teacher_config_(account.model) {
    teacher_config_.mixers.assign(teacher_config_.mixers.size(), MixerSettings{});
  }

  // Two optimiser steps, then every large region and the total within 5 % of the forecast. Exact
  // agreement is not promised: packed documents can make halos shorter.
  void check() {
    run_steps();
    const ForecastInputs inputs{.config = case_.config,
                                .student = case_.model,
                                .teacher = has_teacher() ? &teacher_config_ : nullptr,
                                .mesh = {mesh_.data_count(), mesh_.sequence_count()},
                                .node_ranks = mesh_.node().size(),
                                .work = case_.placement,
                                .teacher_storage = case_.teacher_storage,
                                .recompute = recompute()};
    const PeakBytes forecast = forecast_memory(inputs, case_.stage, mesh_.sequence_index());
    for (const Region region : {Region::weights,
                                Region::teacher_weights,
                                Region::gradients,
                                Region::optimizer,
                                Region::activations,
                                Region::loss,
                                Region::communication}) {
      compare(name_of(region), forecast.of(region), memory_.peak_bytes(region));
    }
    compare("total", forecast.total, memory_.peak_bytes());
  }

 private:
  RecomputePlan recompute() const {
    const RunConfig::Memory& memory = case_.config.memory;
    return {memory.recompute == "auto" ? Recompute::none : recompute_named(memory.recompute),
            memory.kept_layers};
  }

  bool has_teacher() const { return case_.stage != StageKind::pretrain; }

  void compare(std::string_view what, std::int64_t forecast, std::size_t account) const {
    // A device's blocks are multiples of 512 bytes, which the few sums of align notice.
    const double blocks = memory_.on_host() ? 0.0 : 1024.0;
    EXPECT_NEAR(static_cast<double>(forecast),
                static_cast<double>(account),
                0.05 * static_cast<double>(account) + blocks)
        << case_.name << ", " << what << ", rank " << mesh_.world().rank() << " of "
        << mesh_.world().size();
  }

  void fill(Weights& weights) const {
    fill_weights(context_,
                 weights,
                 [](const Parameter& parameter, std::int64_t begin, const TensorView& piece) {
                   CpuStream cpu;
                   run(cpu,
                       FillNormal{.x = piece,
                                  .seed = 1,
                                  .stream = stream_of(parameter.name),
                                  .begin = static_cast<std::uint64_t>(begin),
                                  .deviation = 0.1});
                 });
    weights.share();
  }

  // One document, so that every halo has its full length.
  Row make_row(std::int64_t position) const {
    Row row;
    const std::int64_t tokens = case_.config.data.row_tokens;
    for (std::int64_t token = 0; token < tokens; ++token) {
      const auto id = [&](std::int64_t at) {
        return static_cast<std::int32_t>((at * 7 + position * 13) % case_.model.vocabulary);
      };
      row.ids.push_back(id(token));
      row.next.push_back(token + 1 < tokens ? id(token + 1) : -1);
      row.start.push_back(0);
      row.keep.push_back(1);
    }
    return row;
  }

  std::unique_ptr<Stage> make_stage(Decoder& student, Decoder* teacher, const StageRows& rows) {
    if (case_.stage == StageKind::align) {
      const auto trainable = case_.config.align_extra.trainable == "mixer"
                                 ? AlignTrainable::mixer
                                 : AlignTrainable::new_tensors;
      return std::make_unique<AlignStage>(
          context_, student, *teacher, mesh_, case_.placement, trainable, rows);
    }
    const LogitLossOptions options{.ce_share = has_teacher() ? 0.0 : 1.0,
                                   .chunk = case_.config.memory.logit_chunk};
    return std::make_unique<LogitStage>(
        context_, student, teacher, mesh_, case_.placement, recompute(), options, rows);
  }

  void run_steps() {
    const ParameterTable teacher_table(teacher_config_);
    const ParameterTable student_table(case_.model);
    std::unique_ptr<Weights> teacher_weights;
    std::unique_ptr<Decoder> teacher;
    if (has_teacher()) {
      teacher_weights = std::make_unique<Weights>(
          context_,
          teacher_table,
          mesh_.node(),
          Weights::Options{
              Weights::Placement::sharded, case_.teacher_storage, Region::teacher_weights});
      fill(*teacher_weights);
      teacher = std::make_unique<Decoder>(context_, teacher_config_, *teacher_weights);
    }
    const auto placement = case_.config.memory.weights == "shard" ? Weights::Placement::sharded
                                                                  : Weights::Placement::replicated;
    Weights weights(
        context_, student_table, mesh_.world(), {placement, dtype_, Region::weights, true});
    fill(weights);
    Decoder student(context_, case_.model, weights);
    Optimizer optimizer(context_, weights, case_.config.optimizer, &host_memory_);
    if (keeps_state_copy(case_.config)) {
      optimizer.keep_copy();
    }
    Gradients gradients(context_, student_table, mesh_.world());
    const std::int64_t per_step = case_.config.data.rows_per_step;
    const StageRows rows{.row = [this](std::int64_t position) { return make_row(position); },
                         .first = 0,
                         .per_step = per_step,
                         .steps = 4};  // more than run: the teacher always has rows ahead
    const std::unique_ptr<Stage> stage = make_stage(student, teacher.get(), rows);
    for (std::int64_t step = 0; step < 2; ++step) {
      gradients.clear();
      const StepResult result = stage->run_step(step, gradients);
      optimizer.update({.trains = [&](const Parameter& p) { return stage->trains(p); },
                        .rate = [](const Parameter&) { return 1e-3; },
                        .decays = [](const Parameter& p) { return p.decays; },
                        .clip_scope = stage->clip_scope(),
                        .unit_factors = result.unit_factors,
                        .unit_squares = result.unit_squares,
                        .number = step + 1},
                       gradients);
    }
    if (case_.config.evaluate.every > 0) {
      Evaluator evaluator(context_, mesh_.world(), case_.config.memory.logit_chunk);
      const Validation found = validate(
          context_,
          evaluator,
          mesh_.world(),
          student,
          *teacher,
          [this](std::int64_t index) { return make_row(index); },
          mesh_.world().size());
      EXPECT_EQ(found.divergence.all().tokens,
                static_cast<double>(mesh_.world().size() * case_.config.data.row_tokens));
    }
  }

  AccountCase case_;
  DType dtype_;
  Mesh mesh_;
  Memory& host_memory_;
  Memory& memory_;
  Context context_;
  ModelConfig teacher_config_;
};

// Layers of every kind: full, window alone, pinned tokens, states per query head, states alone,
// sum.
inline std::vector<MixerSettings> mixed_layers() {
  return {MixerSettings{.window = 40, .sink = Sink::tokens, .sink_tokens = 4},
          MixerSettings{.window = 24, .sink = Sink::learned, .states = States::query},
          MixerSettings{.window = 0, .states = States::kv},
          MixerSettings{.window = 30, .states = States::kv, .mix = Mix::sum}};
}

}  // namespace bifocal::test
