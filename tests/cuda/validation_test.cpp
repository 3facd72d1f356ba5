// Validation on the device: the divergence and what is read off the branches, beside the CPU.
#include "evaluate/validation.h"

#include <cmath>

#include <gtest/gtest.h>

#include "cuda/tensor_core_model.h"
#include "parallel/backend.h"

namespace bifocal::test {
namespace {

constexpr std::int64_t kRows = 2;

Validation measure(Backend& backend, DType dtype, std::size_t mixers) {
  Device device(dtype, backend);
  const std::unique_ptr<Communicator> self = backend.communicator(make_self_communicator());
  TinyModel teacher(device.context(), tensor_core_teacher(), *self);
  TinyModel student(
      device.context(),
      tiny_student(tensor_core_teacher(), tiny_students(tensor_core_teacher())[mixers].mixers),
      *self);
  Evaluator evaluator(device.context(), *self, 64);
  return validate(
      device.context(),
      evaluator,
      *self,
      student.decoder(),
      teacher.decoder(),
      [](std::int64_t index) { return random_row(index, 200, tensor_core_teacher().vocabulary); },
      kRows);
}

void expect_close(double got, double want, double bound) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << got;
  } else {
    EXPECT_NEAR(got, want, bound * std::max(1.0, std::abs(want)));
  }
}

void expect_close(const std::vector<double>& got, const std::vector<double>& want, double bound) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(i);
    expect_close(got[i], want[i], bound);
  }
}

// float32 differs in the order of sums alone; bfloat16 rounds to 2^-9 at some thirty stores of each
// of three layers, the weights among them.
TEST(CudaValidation, IsThatOfTheHost) {
  for (const std::size_t mixers : {0U, 2U, 4U}) {
    const Validation want = measure(*make_cpu_backend(0), DType::f64, mixers);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(name_of(dtype));
      const Validation got = measure(*make_cuda_backend(0, 0), dtype, mixers);
      const double bound = dtype == DType::f32 ? 1e-4 : 0.05;
      EXPECT_EQ(got.rows, kRows);
      expect_close(got.branches.gate_means, want.branches.gate_means, bound);
      expect_close(got.branches.far_shares, want.branches.far_shares, bound);
      const DivergenceSums sums = got.divergence.all();
      const DivergenceSums wanted = want.divergence.all();
      EXPECT_EQ(sums.tokens, wanted.tokens);
      ASSERT_GT(wanted.tokens, 0);
      expect_close(sums.kl, wanted.kl, bound);
    }
  }
}

}  // namespace
}  // namespace bifocal::test
