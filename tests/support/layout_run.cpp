// Training under layouts.
#include "support/layout_run.h"

#include <cstring>

#include <gtest/gtest.h>

#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "support/compare.h"
#include "train/optimizer.h"

namespace bifocal::test {

namespace {

std::unique_ptr<Stage> make_stage(const Scenario& scenario,
                                  Context context,
                                  TinyModel& student,
                                  TinyModel& teacher,
                                  const Mesh& mesh) {
  if (scenario.kind == StageKind::align_new || scenario.kind == StageKind::align_mixer) {
    const auto trainable =
        scenario.kind == StageKind::align_new ? AlignTrainable::new_tensors : AlignTrainable::mixer;
    return std::make_unique<AlignStage>(context,
                                        student.decoder(),
                                        teacher.decoder(),
                                        mesh,
                                        scenario.placement,
                                        trainable,
                                        scenario.rows());
  }
  return std::make_unique<LogitStage>(
      context,
      student.decoder(),
      scenario.kind == StageKind::distill ? &teacher.decoder() : nullptr,
      mesh,
      scenario.placement,
      scenario.recompute,
      scenario.loss,
      scenario.rows());
}

void expect_equal_bits(const std::vector<double>& a, const std::vector<double>& b) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(double)), 0);
}

}  // namespace

// Adam's epsilon of the golden files, 1e-4: a small one turns the rounding of gradients near zero
// into steps of full size.
Outcome train(const Scenario& scenario,
              Backend& backend,
              std::unique_ptr<Communicator> world,
              const MeshCounts& counts) {
  Device device(scenario.dtype, backend);
  const Mesh mesh(std::move(world), counts);
  TinyModel teacher(
      device.context(), scenario.teacher, mesh.world(), Weights::Placement::sharded, 1);
  TinyModel student(device.context(),
                    tiny_student(scenario.teacher, scenario.mixers),
                    mesh.world(),
                    scenario.weights,
                    2);
  Gradients gradients(device.context(), student.table(), mesh.world());
  Optimizer optimizer(device.context(), student.weights(), {.eps = 1e-4, .decay = 0.1});
  const auto stage = make_stage(scenario, device.context(), student, teacher, mesh);
  Outcome outcome;
  for (std::int64_t step = 0; step < scenario.steps; ++step) {
    gradients.clear();
    const StepResult result = stage->run_step(step, gradients);
    outcome.losses.insert(outcome.losses.end(), {result.loss, result.kl, result.ce});
    outcome.losses.insert(
        outcome.losses.end(), result.layer_losses.begin(), result.layer_losses.end());
    outcome.kept.push_back(result.kept);
    if (step == 0) {
      outcome.gradients = whole_gradients(
          device.context(), student.table(), gradients, mesh.world(), result.unit_factors);
    }
    outcome.norms.push_back(
        optimizer.update({.trains = [&](const Parameter& p) { return stage->trains(p); },
                          .rate = [](const Parameter&) { return 1e-3; },
                          .decays = [](const Parameter& p) { return p.decays; },
                          .clip_scope = stage->clip_scope(),
                          .clip = 1.0,
                          .unit_factors = result.unit_factors,
                          .unit_squares = result.unit_squares,
                          .number = step + 1},
                         gradients));
  }
  outcome.weights = whole_weights(device.context(), student.weights());
  return outcome;
}

void expect_same_training(const Outcome& got, const Outcome& want, DType dtype) {
  const bool exact = dtype == DType::f64;
  EXPECT_EQ(got.kept, want.kept);
  EXPECT_CLOSE(got.losses, want.losses, exact ? 1e-10 : 1e-5);
  EXPECT_CLOSE(got.norms, want.norms, exact ? 1e-10 : 2e-4);
  const double floor = 0.01 * largest(want.gradients);
  EXPECT_GT(floor, 0.0);
  for (const auto& [name, gradient] : want.gradients) {
    const Difference d = difference(got.gradients.at(name), gradient);
    EXPECT_LE(d.largest, (exact ? 1e-10 : 2e-5) * std::max(d.scale, floor))
        << name << ": " << d.describe();
  }
  for (const auto& [name, weight] : want.weights) {
    EXPECT_TRUE(is_within(got.weights.at(name), weight, exact ? 1e-10 : 2e-5)) << name;
  }
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  expect_equal_bits(a.losses, b.losses);
  expect_equal_bits(a.norms, b.norms);
  for (const auto& [name, weight] : a.weights) {
    SCOPED_TRACE(name);
    expect_equal_bits(b.weights.at(name), weight);
    expect_equal_bits(b.gradients.at(name), a.gradients.at(name));
  }
}

}  // namespace bifocal::test
