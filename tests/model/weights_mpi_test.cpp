// Weights and gradients cut over ranks: whole units are the same whoever holds their parts.
#include <cstring>

#include <gtest/gtest.h>

#include "model/gradients.h"
#include "model/weights.h"
#include "support/compare.h"
#include "support/fill_weights.h"
#include "support/mpi_world.h"
#include "support/tiny_model.h"

namespace bifocal::test {

namespace {

ModelConfig config() {
  const ModelConfig teacher = tiny_teacher(Family::qwen2);
  return tiny_student(teacher, tiny_students(teacher)[2].mixers);
}

// A value for each element of each parameter that float32 and bfloat16 hold exactly.
double mark(const Parameter& parameter, std::int64_t element) {
  return static_cast<double>((parameter.unit * 37 + parameter.offset + element) % 251 - 125);
}

void fill_marks(Context context, Weights& weights, double factor = 1.0) {
  fill_weights(context,
               weights,
               [&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
                 for (std::int64_t i = 0; i < piece.size(); ++i) {
                   const auto value = static_cast<float>(factor * mark(parameter, first + i));
                   if (piece.dtype == DType::bf16) {
                     piece.as<BFloat16>()[i] = to_bfloat16(value);
                   } else {
                     piece.as<float>()[i] = value;
                   }
                 }
               });
}

void expect_marks(const ParameterTable& table,
                  std::int64_t unit,
                  const ConstTensorView& flat,
                  double factor = 1.0) {
  const Unit& range = table.units()[static_cast<std::size_t>(unit)];
  ASSERT_GE(flat.size(), range.size);
  std::vector<double> want(static_cast<std::size_t>(flat.size()),
                           0.0);  // gaps and padding are zero
  for (std::int64_t p = range.begin; p < range.end; ++p) {
    const Parameter& parameter = table.parameters()[static_cast<std::size_t>(p)];
    for (std::int64_t i = 0; i < parameter.size(); ++i) {
      want[static_cast<std::size_t>(parameter.offset + i)] = factor * mark(parameter, i);
    }
  }
  EXPECT_EQ(max_abs_error(flat, want), 0.0) << range.name;
}

TEST(WeightsRanks, WholeUnitsHoldWhatThePartsWereFilledWith) {
  Device device(DType::f32);
  const ParameterTable table(config());
  const auto units = static_cast<std::int64_t>(table.units().size());
  for (const Weights::Options& options :
       {Weights::Options{Weights::Placement::replicated, DType::f32},
        Weights::Options{Weights::Placement::sharded, DType::f32},
        Weights::Options{Weights::Placement::sharded, DType::bf16}}) {
    Weights weights(device.context(), table, test_world(), options);
    fill_marks(device.context(), weights);
    weights.share();
    for (std::int64_t unit = 0; unit < units; ++unit) {
      expect_marks(table, unit, weights.acquire(unit, unit + 1 < units ? unit + 1 : -1));
      weights.release(unit);
    }
    fill_marks(device.context(), weights, 0.5);  // nothing stale once parts have changed
    weights.share();
    for (std::int64_t unit = units - 1; unit >= 0; --unit) {
      expect_marks(table, unit, weights.acquire(unit), 0.5);
      weights.release(unit);
    }
  }
}

TEST(WeightsRanks, AUnitStaysUntilItsLastUserReleasesIt) {
  Device device(DType::f32);
  const ParameterTable table(config());
  Weights weights(device.context(),
                  table,
                  test_world(),
                  {Weights::Placement::sharded, DType::bf16, Region::teacher_weights});
  fill_marks(device.context(), weights);
  const ConstTensorView first = weights.acquire(1);
  const ConstTensorView second = weights.acquire(1, 2);
  EXPECT_EQ(first.data, second.data);
  weights.release(1);
  expect_marks(table, 1, first);
  weights.release(1);
  expect_marks(table, 2, weights.acquire(2));
  weights.release(2);
}

TEST(WeightsRanks, ShardedUnitsLeaveOnlyPartsBehind) {
  Device device(DType::f32);
  const ParameterTable table(config());
  Weights weights(device.context(),
                  table,
                  test_world(),
                  {Weights::Placement::sharded, DType::f32, Region::teacher_weights});
  Memory& memory = device.context().memory;
  const std::size_t before = memory.current_bytes(Region::teacher_weights);
  std::int64_t elements = 0;
  for (const Unit& unit : table.units()) {
    elements += part_size(unit.size, test_world().size());
  }
  EXPECT_GE(before, static_cast<std::size_t>(elements) * sizeof(float));
  weights.acquire(1, 2);
  weights.release(1);
  weights.acquire(2);
  weights.release(2);
  EXPECT_EQ(memory.current_bytes(Region::teacher_weights), before);
}

TEST(WeightsRanks, PiecesCoverEveryParameterOnce) {
  const ParameterTable table(config());
  for (std::int64_t unit = 0; unit < static_cast<std::int64_t>(table.units().size()); ++unit) {
    const Unit& range = table.units()[static_cast<std::size_t>(unit)];
    const std::int64_t part = part_size(range.size, test_world().size());
    std::map<std::string, std::int64_t> next;
    for (int rank = 0; rank < test_world().size(); ++rank) {
      for (const ParameterPiece& piece : pieces_in(table, unit, rank * part, (rank + 1) * part)) {
        std::int64_t& expected = next[piece.parameter->name];
        EXPECT_EQ(piece.first, expected);
        EXPECT_EQ(rank * part + piece.offset, piece.parameter->offset + piece.first);
        EXPECT_GT(piece.count, 0);
        expected += piece.count;
      }
    }
    for (std::int64_t p = range.begin; p < range.end; ++p) {
      const Parameter& parameter = table.parameters()[static_cast<std::size_t>(p)];
      EXPECT_EQ(next[parameter.name], parameter.size()) << parameter.name;
    }
  }
}

TEST(GradientsRanks, SumOverRanksAndMicroBatches) {
  Device device(DType::f32);
  const ParameterTable table(config());
  Communicator& world = test_world();
  Gradients gradients(device.context(), table, world);
  const auto units = static_cast<std::int64_t>(table.units().size());
  const auto whole_value = [&](std::int64_t unit, std::int64_t element, int rank, int batch) {
    return static_cast<float>((unit + 1) * (element % 7) * (rank + 1) + batch);
  };
  double rank_sum = 0.0;  // of rank + 1
  for (int rank = 0; rank < world.size(); ++rank) {
    rank_sum += rank + 1.0;
  }
  for (int round = 0; round < 2;
       ++round) {  // the second after clear(): nothing is left of the first
    gradients.clear();
    for (int batch = 0; batch < 3; ++batch) {
      for (std::int64_t unit = units - 1; unit >= 0; --unit) {
        const TensorView whole = gradients.open(unit);
        EXPECT_EQ(gradients.open(unit).data, whole.data);
        for (std::int64_t i = 0; i < whole.size(); ++i) {
          if (batch == 0 || world.size() > 1) {  // a group of one adds to its parts at once
            EXPECT_EQ(whole.as<float>()[i], 0.0F);
          }
          whole.as<float>()[i] += whole_value(unit, i, world.rank(), batch);
        }
        gradients.close(unit);
      }
      gradients.finish();
    }
    std::vector<double> squares(static_cast<std::size_t>(units), 0.0);
    for (std::int64_t unit = 0; unit < units; ++unit) {
      const TensorView part = gradients.part(unit);
      for (std::int64_t i = 0; i < part.size() * world.size(); ++i) {
        const double want = 3.0 * static_cast<double>((unit + 1) * (i % 7)) * rank_sum +
                            3.0 * static_cast<double>(world.size());
        squares[static_cast<std::size_t>(unit)] += want * want;
        const std::int64_t mine = i - part.size() * world.rank();
        if (mine >= 0 && mine < part.size()) {
          EXPECT_EQ(part.as<float>()[mine], static_cast<float>(want));
        }
      }
    }
    // Small integers: exact in any order.
    EXPECT_EQ(sums_of_squares(gradients, units, world), squares);
  }
}

}  // namespace

}  // namespace bifocal::test
