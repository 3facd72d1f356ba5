// Clipping, frozen parameters and refusal of broken gradients. The update itself is
// tests/ops/adamw_test.cpp's.
#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "core/random.h"
#include "support/compare.h"
#include "support/fill_weights.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

constexpr double kRate = 0.5;

// A student whose every gradient is set by hand. With beta1 = beta2 = 0 and a large epsilon the
// first step moves a parameter by rate * g / (|g| + eps) ~ rate * g / eps: linear in the clipped
// gradient.
class OptimizerTest : public testing::Test {
 protected:
  static constexpr double kEps = 1e9;

  void SetUp() override { set_gradients(1.0); }

  void set_gradients(double value) {
    gradients_.clear();
    for (std::int64_t unit = 0; unit < units(); ++unit) {
      double* elements = gradients_.part(unit).as<double>();
      for (const ParameterPiece& piece :
           pieces_in(model_.table(), unit, 0, gradients_.part(unit).size())) {
        std::fill_n(elements + piece.offset, piece.count, value);
      }
    }
  }

  std::int64_t units() const { return static_cast<std::int64_t>(model_.table().units().size()); }

  double unit_size(std::int64_t unit, bool new_only = false) const {
    double size = 0.0;
    for (const Parameter& p : model_.table().parameters()) {
      if (p.unit == unit && (p.is_new() || !new_only)) {
        size += static_cast<double>(p.size());
      }
    }
    return size;
  }

  Optimizer::Step step() const {
    return {.trains = [](const Parameter&) { return true; },
            .rate = [](const Parameter&) { return kRate; },
            .decays = [](const Parameter&) { return false; },
            .clip_scope = ClipScope::all_parameters,
            .clip = 0.0,
            .unit_factors = std::vector<double>(static_cast<std::size_t>(units()), 1.0),
            .number = 1};
  }

  // One step over the gradients as they stand.
  double update(Optimizer& optimizer, Optimizer::Step step) {
    gradients_.zero_untrained(step.trains);
    step.unit_squares = sums_of_squares(gradients_, units(), *self_);
    return optimizer.update(step, gradients_);
  }

  double update(const Optimizer::Step& step) { return update(optimizer_, step); }

  // Every tensor of a checkpoint whose name begins with "optimizer.".
  NamedValues moments() const {
    NamedValues values;
    optimizer_.save([&](const std::vector<ShardedTensor>& tensors) {
      EXPECT_EQ(tensors.size(), 3 * model_.table().parameters().size());
      for (const ShardedTensor& tensor : tensors) {
        if (tensor.name.starts_with("optimizer.")) {
          values[tensor.name] = to_doubles(tensor.data);
        }
      }
    });
    return values;
  }

  // Largest and smallest move of a unit's parameters, as the gradient that made it.
  void expect_moves(const NamedValues& before, std::int64_t unit, double gradient) {
    const NamedValues after = whole_weights(model_.weights());
    for (const Parameter& p : model_.table().parameters()) {
      if (p.unit != unit) {
        continue;
      }
      for (std::size_t i = 0; i < after.at(p.name).size(); ++i) {
        const double move = (before.at(p.name)[i] - after.at(p.name)[i]) * kEps / kRate;
        // The parameter, of order one, is stored to 1e-16, a move of 5e-10 therefore to 1e-6.
        ASSERT_NEAR(move, gradient, 1e-6 + 1e-6 * gradient) << p.name;
      }
    }
  }

  static ModelConfig config() {
    const ModelConfig teacher = tiny_teacher();
    return tiny_student(teacher, tiny_students(teacher)[2].mixers);
  }

  Device device_{DType::f64};
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  TinyModel model_{device_.context(), config(), *self_};
  Gradients gradients_{device_.context(), model_.table(), *self_};
  Optimizer optimizer_{
      device_.context(), model_.weights(), {.beta1 = 0.0, .beta2 = 0.0, .eps = kEps, .decay = 0.0}};
};

TEST_F(OptimizerTest, ACopyIsLeftAloneUntilTheNextSave) {
  optimizer_.keep_copy();
  EXPECT_TRUE(optimizer_.keeps_copy());
  std::vector<ShardedTensor> held;
  const auto hold = [&](const std::vector<ShardedTensor>& tensors) { held = tensors; };
  const auto values = [&] {
    NamedValues found;
    for (const ShardedTensor& tensor : held) {
      found[tensor.name] = to_doubles(tensor.data);
    }
    return found;
  };
  update(step());
  optimizer_.save(hold);
  const NamedValues before = values();
  Optimizer::Step second = step();
  second.number = 2;
  update(second);
  EXPECT_EQ(values(), before);
  optimizer_.save(hold);
  EXPECT_NE(values(), before);
}

TEST_F(OptimizerTest, WithoutClippingTheGradientStands) {
  const NamedValues before = whole_weights(model_.weights());
  double size = 0.0;
  for (std::int64_t unit = 0; unit < units(); ++unit) {
    size += unit_size(unit);
  }
  EXPECT_NEAR(update(step()), std::sqrt(size), 1e-9);
  for (std::int64_t unit = 0; unit < units(); ++unit) {
    expect_moves(before, unit, 1.0);
  }
}

TEST_F(OptimizerTest, OneNormClipsAllParametersTogether) {
  const NamedValues before = whole_weights(model_.weights());
  Optimizer::Step clipped = step();
  clipped.clip = 2.0;
  clipped.unit_factors.back() = 3.0;
  double squares = 0.0;
  for (std::int64_t unit = 0; unit < units(); ++unit) {
    const double factor = clipped.unit_factors[static_cast<std::size_t>(unit)];
    squares += unit_size(unit) * factor * factor;
  }
  EXPECT_NEAR(update(clipped), std::sqrt(squares), 1e-9);
  const double factor = 2.0 / (std::sqrt(squares) + 1e-6);
  for (std::int64_t unit = 0; unit < units(); ++unit) {
    expect_moves(before, unit, factor * (unit + 1 == units() ? 3.0 : 1.0));
  }
}

TEST_F(OptimizerTest, EachUnitIsClippedByItsOwnNorm) {
  const NamedValues before = whole_weights(model_.weights());
  Optimizer::Step clipped = step();
  clipped.clip = 1.0;
  clipped.clip_scope = ClipScope::each_unit;
  // One unit is below the limit and keeps its gradient.
  clipped.unit_factors[1] = 0.5 / std::sqrt(unit_size(1));
  update(clipped);
  expect_moves(before, 1, clipped.unit_factors[1]);
  for (std::int64_t unit = 2; unit < units(); ++unit) {
    expect_moves(before, unit, 1.0 / (std::sqrt(unit_size(unit)) + 1e-6));
  }
}

TEST_F(OptimizerTest, SmallGradientsAreNotScaledUp) {
  const NamedValues before = whole_weights(model_.weights());
  set_gradients(1e-3);
  Optimizer::Step clipped = step();
  clipped.clip = 100.0;
  update(clipped);
  expect_moves(before, 0, 1e-3);
}

TEST_F(OptimizerTest, FrozenParametersKeepTheirBitsAndDoNotCount) {
  const NamedValues before = whole_weights(model_.weights());
  Optimizer::Step part = step();
  part.trains = [](const Parameter& p) { return p.is_new(); };
  part.decays = [](const Parameter&) { return true; };
  double size = 0.0;
  for (std::int64_t unit = 0; unit < units(); ++unit) {
    size += unit_size(unit, true);
  }
  // What lies in a frozen parameter's gradient must not matter, not even NaN.
  const Parameter& frozen = model_.table().at("model.layers.1.self_attn.q_proj.weight");
  gradients_.part(frozen.unit).as<double>()[frozen.offset + 3] =
      std::numeric_limits<double>::quiet_NaN();
  EXPECT_NEAR(update(part), std::sqrt(size), 1e-9);
  const NamedValues after = whole_weights(model_.weights());
  for (const Parameter& p : model_.table().parameters()) {
    if (p.is_new()) {
      EXPECT_NE(after.at(p.name), before.at(p.name)) << p.name;
    } else {
      EXPECT_EQ(after.at(p.name), before.at(p.name)) << p.name;
    }
  }
}

TEST_F(OptimizerTest, DecayAndRateAreThoseOfTheParameter) {
  const NamedValues before = whole_weights(model_.weights());
  Optimizer decaying(device_.context(), model_.weights(), {.decay = 0.1});
  set_gradients(0.0);
  Optimizer::Step mixed = step();
  mixed.decays = [](const Parameter& p) { return p.decays; };
  mixed.rate = [](const Parameter& p) { return p.is_new() ? 0.0 : kRate; };
  update(decaying, mixed);
  const NamedValues after = whole_weights(model_.weights());
  for (const Parameter& p : model_.table().parameters()) {
    for (std::size_t i = 0; i < after.at(p.name).size(); ++i) {
      const double kept = p.decays ? 1.0 - kRate * 0.1 : 1.0;
      ASSERT_NEAR(after.at(p.name)[i], kept * before.at(p.name)[i], 1e-14) << p.name;
    }
  }
}

TEST_F(OptimizerTest, ABrokenGradientThrowsAndChangesNothing) {
  for (const double broken :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const NamedValues before = whole_weights(model_.weights());
    set_gradients(1.0);
    gradients_.part(units() - 1).as<double>()[0] = broken;
    EXPECT_THROW(update(step()), Error);
    EXPECT_EQ(whole_weights(model_.weights()), before);
    EXPECT_EQ(largest(moments()), 0.0);
  }
}

TEST_F(OptimizerTest, ResetForgetsTheMoments) {
  update(step());
  EXPECT_GT(largest(moments()), 0.0);
  optimizer_.reset();
  EXPECT_EQ(largest(moments()), 0.0);
}

// A student in float32 whose parts may be stored in bfloat16, updated twice with drawn gradients.
class StoredStudent {
 public:
  StoredStudent(DType storage, const std::string& moments)
      : weights_(device_.context(),
                 table_,
                 *self_,
                 {Weights::Placement::sharded, storage, Region::weights, true}),
        gradients_(device_.context(), table_, *self_),
        optimizer_(device_.context(), weights_, {.moments = moments}) {
    fill_weights(device_.context(),
                 weights_,
                 [](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
                   for (std::int64_t i = 0; i < piece.size(); ++i) {
                     piece.as<float>()[i] = static_cast<float>(random_normal(
                         3, stream_of(parameter.name), static_cast<std::uint64_t>(first + i)));
                   }
                 });
  }

  void train(std::int64_t steps) {
    for (std::int64_t step = 1; step <= steps; ++step) {
      for (std::int64_t unit = 0; unit < units(); ++unit) {
        const TensorView part = gradients_.part(unit);
        for (const ParameterPiece& piece : pieces_in(table_, unit, 0, part.size())) {
          for (std::int64_t i = 0; i < piece.count; ++i) {
            part.as<float>()[piece.offset + i] = static_cast<float>(
                random_normal(4, static_cast<std::uint64_t>(10 * unit + step), i));
          }
        }
      }
      optimizer_.update({.trains = [](const Parameter&) { return true; },
                         .rate = [](const Parameter& p) { return p.is_new() ? 1e-2 : 1e-3; },
                         .decays = [](const Parameter& p) { return p.decays; },
                         .unit_factors = std::vector<double>(table_.units().size(), 1.0),
                         .unit_squares = sums_of_squares(gradients_, units(), *self_),
                         .number = step},
                        gradients_);
    }
  }

  // What a checkpoint holds.
  NamedValues saved() const {
    NamedValues values;
    optimizer_.save([&](const std::vector<ShardedTensor>& tensors) {
      for (const ShardedTensor& tensor : tensors) {
        EXPECT_EQ(tensor.data.dtype, DType::f32) << tensor.name;
        values[tensor.name] = to_doubles(tensor.data);
      }
    });
    return values;
  }

  void load(const NamedValues& values) {
    optimizer_.load([&](const std::vector<ShardedTensor>& tensors) {
      for (const ShardedTensor& tensor : tensors) {
        const std::vector<double>& from = values.at(tensor.name);
        std::transform(from.begin(), from.end(), tensor.data.as<float>(), [](double x) {
          return static_cast<float>(x);
        });
      }
    });
  }

  Weights& weights() { return weights_; }

 private:
  std::int64_t units() const { return static_cast<std::int64_t>(table_.units().size()); }

  static ModelConfig config() {
    const ModelConfig teacher = tiny_teacher();
    return tiny_student(teacher, tiny_students(teacher)[2].mixers);
  }

  Device device_{DType::f32};
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  ParameterTable table_{config()};
  Weights weights_;
  Gradients gradients_;
  Optimizer optimizer_;
};

double rounded(double value) {
  return to_float(to_bfloat16(static_cast<float>(value)));
}

NamedValues rounded(NamedValues values) {
  for (auto& [name, whole] : values) {
    std::transform(
        whole.begin(), whole.end(), whole.begin(), [](double value) { return rounded(value); });
  }
  return values;
}

NamedValues only_weights(NamedValues values) {
  std::erase_if(values, [](const auto& item) { return item.first.starts_with("optimizer."); });
  return values;
}

TEST(StoredOptimizer, MastersAreUpdatedAndTheirRoundingIsWhatComputes) {
  StoredStudent wide(DType::f32, "float32");
  StoredStudent narrow(DType::bf16, "float32");
  EXPECT_FALSE(wide.weights().has_masters());
  ASSERT_TRUE(narrow.weights().has_masters());
  EXPECT_EQ(whole_weights(narrow.weights()), rounded(only_weights(narrow.saved())));
  wide.train(2);
  narrow.train(2);
  EXPECT_EQ(narrow.saved(), wide.saved());
  EXPECT_EQ(whole_weights(narrow.weights()), rounded(only_weights(narrow.saved())));
  EXPECT_NE(whole_weights(narrow.weights()), only_weights(narrow.saved()));
}

TEST(StoredOptimizer, ACheckpointCarriesMastersAndMomentsOfEveryType) {
  for (const char* moments : {"float32", "bfloat16", "host"}) {
    StoredStudent first(DType::bf16, moments);
    first.train(2);
    StoredStudent second(DType::bf16, moments);
    second.load(first.saved());
    EXPECT_EQ(second.saved(), first.saved()) << moments;
    EXPECT_EQ(whole_weights(second.weights()), whole_weights(first.weights())) << moments;
  }
}

TEST(StoredOptimizer, MomentsInTheHostsMemoryAreTheSame) {
  StoredStudent device(DType::f32, "float32");
  StoredStudent host(DType::f32, "host");
  device.train(2);
  host.train(2);
  EXPECT_EQ(host.saved(), device.saved());
}

// bfloat16 holds 8 bits: the moments of two steps are off by two roundings, hence a move of the
// parameter by a few thousandths of the rate.
TEST(StoredOptimizer, NarrowMomentsMoveParametersAlmostAlike) {
  StoredStudent wide(DType::f32, "float32");
  StoredStudent narrow(DType::f32, "bfloat16");
  wide.train(2);
  narrow.train(2);
  const NamedValues want = wide.saved();
  for (const auto& [name, values] : narrow.saved()) {
    if (name.starts_with("optimizer.")) {
      EXPECT_EQ(rounded(NamedValues{{name, values}}).at(name), values);
      continue;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], want.at(name)[i], 0.02 * 1e-2) << name;
    }
  }
}

}  // namespace

}  // namespace bifocal::test
