// Training steps on the device: bfloat16 beside the CPU in double, the same bits whatever is
// computed again and wherever moments lie.
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/random.h"
#include "cuda/tensor_core_model.h"
#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "parallel/backend.h"
#include "support/device_values.h"
#include "support/fill_weights.h"
#include "train/optimizer.h"

namespace bifocal::test {
namespace {

constexpr std::int64_t kTokens = 200;

// Values that bfloat16 holds, so that every type starts from the same model.
void fill(Context context, Weights& weights, std::uint64_t seed) {
  fill_weights(
      context,
      weights,
      [&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
        CpuStream cpu;
        Memory memory;
        const Tensor narrow = memory.empty(Region::weights, DType::bf16, piece.shape);
        const bool is_norm = parameter.name.find("norm") != std::string::npos;
        const double deviation = is_norm ? 0.1 : parameter.name.ends_with(".bias") ? 0.5 : 0.08;
        for (std::int64_t i = 0; i < piece.size(); ++i) {
          const double normal =
              random_normal(seed, stream_of(parameter.name), static_cast<std::uint64_t>(first + i));
          narrow.as<BFloat16>()[i] =
              to_bfloat16(static_cast<float>((is_norm ? 1.0 : 0.0) + deviation * normal));
        }
        run(cpu, Cast{.y = piece, .x = narrow});
      });
  weights.share();
}

struct Settings {
  DType dtype = DType::bf16;
  std::string moments = "float32";
  RecomputePlan recompute;
  bool aligns = false;
  std::int64_t steps = 2;
  bool keeps_copy = false;  // of the state, for saves
};

struct Outcome {
  std::vector<double> losses, norms;
  NamedValues gradients;  // of the first step
  NamedValues saved;      // masters and moments after the last
};

// A student of a teacher of the same shape, trained on rows of packed documents.
class DeviceRun {
 public:
  DeviceRun(Backend& backend, const Settings& settings)
      : settings_(settings),
        context_{backend.stream(), backend.memory(), settings.dtype},
        mesh_(backend.communicator(make_self_communicator()), {.data = 1, .sequence = 1}),
        config_(
            tiny_student(tensor_core_teacher(), tiny_students(tensor_core_teacher())[4].mixers)),
        teacher_weights_(context_,
                         teacher_table_,
                         mesh_.node(),
                         {Weights::Placement::sharded, settings.dtype, Region::teacher_weights}),
        weights_(context_,
                 table_,
                 mesh_.world(),
                 {Weights::Placement::replicated, settings.dtype, Region::weights, true}),
        optimizer_(context_, weights_, {.moments = settings.moments}, &backend.host_memory()),
        gradients_(context_, table_, mesh_.world()) {
    fill(context_, teacher_weights_, 1);
    fill(context_, weights_, 2);
    if (settings.keeps_copy) {
      optimizer_.keep_copy();
    }
  }

  Outcome train() {
    Decoder teacher(context_, tensor_core_teacher(), teacher_weights_);
    Decoder student(context_, config_, weights_);
    const std::unique_ptr<Stage> stage = make_stage(student, teacher);
    Outcome outcome;
    for (std::int64_t step = 0; step < settings_.steps; ++step) {
      gradients_.clear();
      const StepResult result = stage->run_step(step, gradients_);
      outcome.losses.push_back(result.loss);
      if (step == 0) {
        outcome.gradients = gradients(result.unit_factors);
      }
      outcome.norms.push_back(
          optimizer_.update({.trains = [&](const Parameter& p) { return stage->trains(p); },
                             .rate = [](const Parameter& p) { return p.is_new() ? 1e-2 : 1e-3; },
                             .decays = [](const Parameter& p) { return p.decays; },
                             .clip_scope = stage->clip_scope(),
                             .unit_factors = result.unit_factors,
                             .unit_squares = result.unit_squares,
                             .number = step + 1},
                            gradients_));
    }
    optimizer_.save([&](const std::vector<ShardedTensor>& tensors) {
      for (const ShardedTensor& tensor : tensors) {
        outcome.saved[tensor.name] = to_doubles(tensor.data);
      }
    });
    return outcome;
  }

 private:
  std::unique_ptr<Stage> make_stage(Decoder& student, Decoder& teacher) {
    const StageRows rows = stage_rows(
        [](std::int64_t position) {
          return random_row(position, kTokens, tensor_core_teacher().vocabulary);
        },
        2,
        settings_.steps);
    if (settings_.aligns) {
      return std::make_unique<AlignStage>(context_,
                                          student,
                                          teacher,
                                          mesh_,
                                          TeacherPlacement::look_ahead,
                                          AlignTrainable::mixer,
                                          rows);
    }
    return std::make_unique<LogitStage>(context_,
                                        student,
                                        &teacher,
                                        mesh_,
                                        TeacherPlacement::look_ahead,
                                        settings_.recompute,
                                        LogitLossOptions{.ce_share = 0.3, .chunk = 64},
                                        rows);
  }

  NamedValues gradients(const std::vector<double>& factors) {
    NamedValues values;
    for (const Parameter& parameter : table_.parameters()) {
      const TensorView part = gradients_.part(parameter.unit);
      std::vector<double> own =
          values_of(context_, part.rows(parameter.offset, parameter.offset + parameter.size()));
      for (double& value : own) {
        value *= factors[static_cast<std::size_t>(parameter.unit)];
      }
      values[parameter.name] = std::move(own);
    }
    return values;
  }

  Settings settings_;
  Context context_;
  Mesh mesh_;
  ModelConfig config_;
  ParameterTable teacher_table_{tensor_core_teacher()};
  ParameterTable table_{config_};
  Weights teacher_weights_;
  Weights weights_;
  Optimizer optimizer_;
  Gradients gradients_;
};

double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) {
    sum += value * value;
  }
  return std::sqrt(sum);
}

double norm_of(const NamedValues& values) {
  std::vector<double> norms;
  for (const auto& [name, own] : values) {
    norms.push_back(norm_of(own));
  }
  return norm_of(norms);
}

NamedValues minus(NamedValues a, const NamedValues& b) {
  for (auto& [name, values] : a) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] -= b.at(name)[i];
    }
  }
  return a;
}

void expect_same(const Outcome& got, const Outcome& want, const std::string& what) {
  EXPECT_EQ(got.losses, want.losses) << what;
  EXPECT_EQ(got.norms, want.norms) << what;
  EXPECT_EQ(norm_of(minus(got.gradients, want.gradients)), 0.0) << what;
  EXPECT_EQ(norm_of(minus(got.saved, want.saved)), 0.0) << what;
}

class CudaTraining : public testing::TestWithParam<Kernels> {
 protected:
  Outcome train(const Settings& settings) { return DeviceRun(*backend_, settings).train(); }

  std::unique_ptr<Backend> backend_ = make_cuda_backend(0, 0, GetParam());
};

// bfloat16 rounds to 2^-9 at some thirty stores of each of three layers, hence a few per cent of
// the whole gradient; a tensor that adds up many terms of both signs may lose more.
TEST_P(CudaTraining, GradientsInBfloat16AreThoseOfTheHost) {
  for (const bool aligns : {false, true}) {
    const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
    const Outcome want =
        DeviceRun(*cpu, {.dtype = DType::f64, .aligns = aligns, .steps = 1}).train();
    const Outcome exact = train({.dtype = DType::f32, .aligns = aligns, .steps = 1});
    const Outcome got = train({.dtype = DType::bf16, .aligns = aligns, .steps = 1});
    const double size = norm_of(want.gradients);
    EXPECT_NEAR(exact.losses[0], want.losses[0], 1e-4 * want.losses[0]);
    EXPECT_NEAR(got.losses[0], want.losses[0], 0.03 * want.losses[0]);
    EXPECT_LE(norm_of(minus(exact.gradients, want.gradients)), 1e-4 * size);
    EXPECT_LE(norm_of(minus(got.gradients, want.gradients)), 0.05 * size);
    for (const auto& [name, values] : got.gradients) {
      const std::vector<double>& of = want.gradients.at(name);
      const double error = norm_of(minus({{name, values}}, {{name, of}}));
      EXPECT_LE(error, 0.25 * norm_of(of) + 1e-3 * size) << name << " of norm " << norm_of(of);
    }
  }
}

TEST_P(CudaTraining, WhatIsComputedAgainChangesNoBit) {
  const Outcome want = train({});
  expect_same(train({}), want, "a second run");
  for (const RecomputePlan& plan : {RecomputePlan(Recompute::light),
                                    RecomputePlan(Recompute::mlp, 1),
                                    RecomputePlan(Recompute::mixer, 2),
                                    RecomputePlan(Recompute::block)}) {
    expect_same(train({.recompute = plan}), want, std::string(name_of(plan.level)));
  }
}

TEST_P(CudaTraining, MomentsOnTheHostAreTheSameAndNarrowOnesClose) {
  const Outcome want = train({.steps = 3});
  expect_same(train({.moments = "host", .steps = 3}), want, "host");
  const Outcome narrow = train({.moments = "bfloat16", .steps = 3});
  EXPECT_EQ(narrow.losses[0], want.losses[0]);
  EXPECT_LE(norm_of(minus(narrow.saved, want.saved)), 0.01 * norm_of(want.saved));
}

TEST_P(CudaTraining, ACopyOfTheStateIsWhatASaveWithoutItHolds) {
  for (const std::string moments : {"float32", "host", "bfloat16"}) {
    const Outcome want = train({.moments = moments});
    const Outcome got = train({.moments = moments, .keeps_copy = true});
    ASSERT_EQ(got.saved.size(), want.saved.size());
    EXPECT_EQ(norm_of(minus(got.saved, want.saved)), 0.0) << moments;
  }
}

INSTANTIATE_TEST_SUITE_P(Portable, CudaTraining, testing::Values(Kernels::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, CudaTraining, testing::Values(Kernels::automatic));

}  // namespace
}  // namespace bifocal::test
