// Losses on logits on the device against their CPU op in double.
#include "ops/distill_loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "support/compare.h"
#include "support/fill.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::on_device;
using test::stored_normals;

// The same numbers on the device.
DeviceTensor copied_to_device(const ConstTensorView& values) {
  return on_device(values, values.dtype, 0);
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Types {
  DType logits, gradient;
  int shift;
};

const Types kTypes[] = {{DType::f32, DType::f32, 0},
                        {DType::f32, DType::f32, 1},
                        {DType::f32, DType::bf16, 0},
                        {DType::f32, DType::bf16, 3},
                        {DType::bf16, DType::bf16, 0},
                        {DType::bf16, DType::bf16, 3}};

// Logits and weights in double; every second row or so has no weight of one kind, some of neither.
struct Problem {
  Tensor student, teacher, next, kl_weight, ce_weight;
};

// What the op gives, and what its terms add up to in magnitude: the scale of rounding errors.
struct Outputs {
  Tensor d_student, kl, ce, agree;
};

class CudaDistillLoss : public testing::Test {
 protected:
  Problem make(DType logits, std::int64_t rows, std::int64_t vocabulary, std::uint64_t seed = 1) {
    Problem p{stored_normals(memory_, logits, {rows, vocabulary}, seed, 3.0),
              stored_normals(memory_, logits, {rows, vocabulary}, seed + 1, 3.0),
              memory_.empty(Region::loss, DType::i32, {rows}),
              memory_.empty(Region::loss, DType::f64, {rows}),
              memory_.empty(Region::loss, DType::f64, {rows})};
    test::fill_below(p.next, 3, vocabulary);
    test::fill(p.kl_weight, [](std::int64_t t) {
      return t % 3 == 2 ? 0.0 : 0.25 + 0.1 * static_cast<double>(t);
    });
    test::fill(p.ce_weight, [](std::int64_t t) {
      return t % 4 >= 2 ? 0.0 : 0.5 + 0.1 * static_cast<double>(t);
    });
    return p;
  }

  Outputs outputs(std::int64_t rows, std::int64_t vocabulary) {
    return {memory_.empty(Region::loss, DType::f64, {rows, vocabulary}),
            memory_.empty(Region::loss, DType::f64, {rows}),
            memory_.empty(Region::loss, DType::f64, {rows}),
            memory_.empty(Region::loss, DType::u8, {rows})};
  }

  static DistillLoss with(const Problem& p, const Outputs& out, double temperature) {
    DistillLoss op{out.d_student,
                   out.kl,
                   out.ce,
                   out.agree,
                   p.student,
                   p.teacher,
                   p.next,
                   p.kl_weight,
                   p.ce_weight,
                   temperature};
    return op;
  }

  // The op's host tensors on the device; results start as NaN or 255.
  struct OnDevice {
    DeviceTensor d_student, kl, ce, agree, student, teacher, next, kl_weight, ce_weight;
    double temperature;

    OnDevice(const Problem& p, const Types& types, double heat)
        : d_student(types.gradient, p.student.shape(), types.shift),
          kl(DType::f64, p.next.shape(), types.shift),
          ce(DType::f64, p.next.shape(), types.shift),
          agree(DType::u8, p.next.shape(), types.shift),
          student(on_device(p.student, types.logits, types.shift)),
          teacher(on_device(p.teacher, types.logits, types.shift)),
          next(copied_to_device(p.next)),
          kl_weight(copied_to_device(p.kl_weight)),
          ce_weight(copied_to_device(p.ce_weight)),
          temperature(heat) {
      for (const DeviceTensor* x : {&d_student, &kl, &ce, &agree}) {
        BIFOCAL_CUDA(cudaMemset(x->view().data, 0xff, x->view().bytes()));
      }
      BIFOCAL_CUDA(cudaDeviceSynchronize());
    }

    DistillLoss op() const {
      return {d_student.view(),
              kl.view(),
              ce.view(),
              agree.view(),
              student.view(),
              teacher.view(),
              next.view(),
              kl_weight.view(),
              ce_weight.view(),
              temperature};
    }
  };

  void call(const DistillLoss& op) {
    op.check();
    run(stream_, op);
  }

  // Magnitudes of the terms of a gradient: weights times the sum of probabilities.
  static std::vector<double> magnitudes(const Problem& p, double temperature) {
    const std::int64_t size = p.student.shape()[1];
    std::vector<double> all;
    const auto softmax = [&](const Tensor& logits, std::int64_t t, double heat) {
      const double* x = logits.as<double>() + t * size;
      std::vector<double> q(x, x + size);
      const double largest = *std::max_element(x, x + size);
      double sum = 0.0;
      for (double& value : q) {
        value = std::exp((value - largest) / heat);
        sum += value;
      }
      for (double& value : q) {
        value /= sum;
      }
      return q;
    };
    for (std::int64_t t = 0; t < p.student.shape()[0]; ++t) {
      const std::vector<double> q = softmax(p.student, t, temperature);
      const std::vector<double> r = softmax(p.teacher, t, temperature);
      const std::vector<double> plain = softmax(p.student, t, 1.0);
      for (std::int64_t i = 0; i < size; ++i) {
        const auto j = static_cast<std::size_t>(i);
        const double is_next = i == p.next.as<std::int32_t>()[t] ? 1.0 : 0.0;
        all.push_back(p.kl_weight.as<double>()[t] * temperature * (q[j] + r[j]) +
                      p.ce_weight.as<double>()[t] * (plain[j] + is_next));
      }
    }
    return all;
  }

  // A probability's error is that of its exponent, up to 40 with a roundoff each for the
  // difference to the largest logit and its product, and a few for exponential and sums.
  static constexpr double kRoundoffs = 100.0;

  void expect_losses(const OnDevice& got, const Outputs& want) {
    // Where the models are all but equal a distance of 1e-6 in the exponents remains, squared.
    const std::vector<double> kl = got.kl.download(stream_);
    const double largest = test::difference(kl, test::to_doubles(want.kl)).scale;
    EXPECT_WITHIN(kl, want.kl, 3e-6 * largest + 1e-12);
    EXPECT_CLOSE(got.ce.download(stream_), want.ce, 3e-6);
    const std::vector<double> agree = got.agree.download(stream_);
    for (std::size_t t = 0; t < agree.size(); ++t) {
      EXPECT_EQ(agree[t], want.agree.as<std::uint8_t>()[t]) << "row " << t;
    }
  }

  void compare(const Types& types, std::int64_t rows, std::int64_t vocabulary, double heat) {
    SCOPED_TRACE(fmt::format("{} to {} shifted {}; {} x {} at temperature {}",
                             name_of(types.logits),
                             name_of(types.gradient),
                             types.shift,
                             rows,
                             vocabulary,
                             heat));
    const Problem p = make(types.logits, rows, vocabulary);
    const Outputs want = outputs(rows, vocabulary);
    run(cpu_, with(p, want, heat));
    const OnDevice got(p, types, heat);
    call(got.op());
    expect_losses(got, want);
    test::expect_close(got.d_student.download(stream_),
                       want.d_student,
                       types.gradient,
                       kRoundoffs,
                       magnitudes(p, heat));
  }

  Memory memory_;
  CpuStream cpu_;
  CudaStream stream_;
};

// Vocabularies around a vector, a warp's and a block's groups, and the chunks of a thread.
TEST_F(CudaDistillLoss, MatchesTheCpuOp) {
  for (const Types& types : kTypes) {
    for (const std::int64_t vocabulary : {1, 2, 31, 128, 1001, 2048, 4096, 4104, 8200, 20008}) {
      for (const double heat : {1.0, 2.5}) {
        compare(types, 7, vocabulary, heat);
      }
    }
  }
  compare(kTypes[0], 0, 16, 1.0);
  compare(kTypes[0], 300, 64, 1.0);
}

TEST_F(CudaDistillLoss, MatchesTheCpuOpOnQwenRows) {
  compare(kTypes[0], 2, 151936, 1.0);
  compare(kTypes[2], 2, 151936, 1.0);
  compare(kTypes[4], 2, 151936, 2.0);
}

TEST_F(CudaDistillLoss, GradientMayReplaceTheLogits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const double heat : {1.0, 2.0}) {
      const Problem p = make(type, 13, 5000);
      const OnDevice apart(p, {type, type, 0}, heat);
      call(apart.op());
      const OnDevice in_place(p, {type, type, 0}, heat);
      DistillLoss op = in_place.op();
      op.d_student = in_place.student.view();
      call(op);
      EXPECT_EQ(in_place.student.download(stream_), apart.d_student.download(stream_));
      EXPECT_EQ(in_place.kl.download(stream_), apart.kl.download(stream_));
      EXPECT_EQ(in_place.ce.download(stream_), apart.ce.download(stream_));
    }
  }
}

TEST_F(CudaDistillLoss, EqualLogitsGiveExactZeros) {
  for (const double heat : {1.0, 0.7, 3.0}) {
    Problem p = make(DType::f32, 9, 1332);
    std::copy_n(p.student.as<double>(), p.student.size(), p.teacher.as<double>());
    const OnDevice got(p, kTypes[0], heat);
    DistillLoss op = got.op();
    op.ce_weight = {};
    call(op);
    EXPECT_EQ(got.kl.download(stream_), std::vector<double>(9, 0.0));
    EXPECT_EQ(got.d_student.download(stream_), std::vector<double>(9 * 1332, 0.0));
    EXPECT_EQ(got.agree.download(stream_), std::vector<double>(9, 1.0));
  }
}

// As on the CPU: a logit's float32 subtraction carries 1e-6, the divergence is of second order.
TEST_F(CudaDistillLoss, SmallDivergencesKeepTheirDigits) {
  for (const double distance : {1e-1, 1e-2, 1e-3, 1e-4}) {
    const Problem p = make(DType::f32, 8, 1000);
    const Tensor noise = stored_normals(memory_, DType::f32, {8, 1000}, 9, distance);
    for (std::int64_t i = 0; i < p.teacher.size(); ++i) {
      p.teacher.as<double>()[i] =
          test::rounded(DType::f32, p.student.as<double>()[i] + noise.as<double>()[i] + 2.0);
    }
    const Outputs want = outputs(8, 1000);
    run(cpu_, with(p, want, 1.0));
    const OnDevice got(p, kTypes[0], 1.0);
    call(got.op());
    EXPECT_CLOSE(got.kl.download(stream_), want.kl, 2e-6 + 2e-6 / distance);
  }
}

TEST_F(CudaDistillLoss, FarApartLogitsStayFinite) {
  Problem p = make(DType::f32, 2, 3);
  std::ranges::copy(std::vector<double>{0.0, 300.0, -300.0, 1e4, 0.0, -1e4},
                    p.student.as<double>());
  std::ranges::copy(std::vector<double>{300.0, 0.0, -300.0, -1e4, 1e4, 0.0},
                    p.teacher.as<double>());
  test::fill(p.kl_weight, [](std::int64_t) { return 1.0; });
  const OnDevice got(p, kTypes[0], 1.0);
  DistillLoss op = got.op();
  op.ce_weight = {};
  call(op);
  const std::vector<double> want_kl = {300.0, 1e4};
  const std::vector<double> want_gradient = {-1.0, 1.0, 0.0, 1.0, -1.0, 0.0};
  EXPECT_CLOSE(got.kl.download(stream_), want_kl, 1e-6);
  EXPECT_WITHIN(got.d_student.download(stream_), want_gradient, 1e-6);
}

TEST_F(CudaDistillLoss, AgreesOnTheLowestOfTheLargest) {
  const std::int64_t size = 9000;
  Problem p = make(DType::f32, 3, size);
  const auto set = [&](const Tensor& x, std::int64_t t, std::int64_t id) {
    x.as<double>()[t * size + id] = 50.0;
  };
  set(p.student, 0, 4500);  // of two largest the lower one, in whichever thread they are
  set(p.student, 0, 8100);
  set(p.teacher, 0, 4500);
  set(p.student, 1, 100);
  set(p.student, 1, 8200);
  set(p.teacher, 1, 8200);
  set(p.student, 2, 8999);
  set(p.student, 2, 7);
  set(p.teacher, 2, 7);
  for (const Types& types : kTypes) {
    const OnDevice got(p, types, 1.0);
    DistillLoss op;
    op.agree = got.agree.view();
    op.student = got.student.view();
    op.teacher = got.teacher.view();
    call(op);
    EXPECT_EQ(got.agree.download(stream_), (std::vector<double>{1.0, 0.0, 1.0}));
  }
}

TEST_F(CudaDistillLoss, RowsWithoutWeightGetExactZerosEvenFromNan) {
  for (const Types& types : kTypes) {
    const Problem p = make(types.logits, 3, 1000);
    test::fill(p.student.rows(1, 2), [](std::int64_t) { return kNan; });
    p.kl_weight.as<double>()[1] = 0.0;
    p.ce_weight.as<double>()[1] = 0.0;
    const OnDevice got(p, types, 1.0);
    call(got.op());
    const std::vector<double> d = got.d_student.download(stream_);
    for (std::size_t i = 0; i < d.size(); ++i) {
      if (i / 1000 == 1) {
        ASSERT_EQ(d[i], 0.0) << "element " << i;
      } else {
        ASSERT_TRUE(std::isfinite(d[i])) << "element " << i;
      }
    }
  }
}

TEST_F(CudaDistillLoss, WithoutTeacherIsTheNextTokenLoss) {
  for (const Types& types : kTypes) {
    const Problem p = make(types.logits, 8, 3000);
    const Outputs want = outputs(8, 3000);
    DistillLoss cpu_op = with(p, want, 1.0);
    const OnDevice got(p, types, 1.0);
    DistillLoss op = got.op();
    for (DistillLoss* each : {&cpu_op, &op}) {
      each->teacher = {};
      each->kl = {};
      each->agree = {};
      each->kl_weight = {};
    }
    run(cpu_, cpu_op);
    call(op);
    EXPECT_CLOSE(got.ce.download(stream_), want.ce, 3e-6);
    test::fill(p.kl_weight, [](std::int64_t) { return 0.0; });
    test::expect_close(got.d_student.download(stream_),
                       want.d_student,
                       types.gradient,
                       kRoundoffs,
                       magnitudes(p, 1.0));
  }
}

// A token without a successor counts for nothing; an id of another vocabulary must not go unseen.
TEST_F(CudaDistillLoss, NextIdsOutsideOfTheVocabulary) {
  const Problem p = make(DType::f32, 4, 40);
  test::fill(p.ce_weight, [](std::int64_t t) { return t < 2 ? 0.0 : 0.7; });
  const std::vector<std::int32_t> next = {-1, 40, 40, -1};
  std::ranges::copy(next, p.next.as<std::int32_t>());
  const OnDevice got(p, kTypes[0], 1.0);
  call(got.op());
  const std::vector<double> ce = got.ce.download(stream_);
  const std::vector<double> d = got.d_student.download(stream_);
  EXPECT_EQ(ce[0], 0.0);
  EXPECT_TRUE(std::isnan(ce[1]));
  EXPECT_TRUE(std::isnan(ce[2]));
  EXPECT_TRUE(std::isfinite(d[0]));
  EXPECT_TRUE(std::isfinite(d[40]));
  EXPECT_TRUE(std::isnan(d[80]));
  EXPECT_TRUE(std::isnan(d[120]));
}

TEST_F(CudaDistillLoss, RowsDoNotDependOnOthersAndBitsStay) {
  const Problem p[] = {make(DType::f32, 40, 6000, 1), make(DType::f32, 40, 6000, 11)};
  const OnDevice device[] = {OnDevice(p[0], kTypes[2], 1.0), OnDevice(p[1], kTypes[2], 1.0)};
  std::vector<std::vector<double>> first[2];
  for (std::size_t repeat = 0; repeat < 100; ++repeat) {
    const std::size_t which = repeat % 2;
    call(device[which].op());
    const std::vector<std::vector<double>> got = {device[which].d_student.download(stream_),
                                                  device[which].kl.download(stream_),
                                                  device[which].ce.download(stream_)};
    if (repeat < 2) {
      first[which] = got;
    }
    ASSERT_TRUE(got == first[which]) << "repeat " << repeat;
  }
  DistillLoss alone = device[0].op();
  for (TensorView* x : {&alone.d_student, &alone.kl, &alone.ce, &alone.agree}) {
    *x = x->rows(17, 18);
  }
  for (ConstTensorView* x :
       {&alone.student, &alone.teacher, &alone.next, &alone.kl_weight, &alone.ce_weight}) {
    *x = x->rows(17, 18);
  }
  call(alone);
  EXPECT_TRUE(device[0].d_student.download(stream_) == first[0][0]);
  EXPECT_TRUE(device[0].kl.download(stream_) == first[0][1]);
}

// More than 2^31 logits: the last row gives what it gives alone.
TEST_F(CudaDistillLoss, TakesMoreThanTwoToThe31Logits) {
  const std::int64_t size = 151936;
  const std::int64_t rows = (std::int64_t{1} << 31) / size + 2;
  const Problem p = make(DType::f32, 1, size);
  p.kl_weight.as<double>()[0] = 0.5;
  p.ce_weight.as<double>()[0] = 0.5;
  const OnDevice one(p, kTypes[2], 1.0);
  call(one.op());

  struct Block {
    TensorView view;

    Block(DType type, const Shape& shape) : view{nullptr, type, shape} {
      BIFOCAL_CUDA(cudaMalloc(&view.data, view.bytes()));
      BIFOCAL_CUDA(cudaMemset(view.data, 0, view.bytes()));
    }

    ~Block() { cudaFree(view.data); }
  };

  const Block d_student(DType::bf16, {rows, size});
  const Block student(DType::f32, {rows, size});
  const Block teacher(DType::f32, {rows, size});
  const Block next(DType::i32, {rows});
  const Block weight(DType::f64, {rows});
  const auto copy_last = [&](const Block& to, const DeviceTensor& from) {
    BIFOCAL_CUDA(cudaMemcpy(to.view.rows(rows - 1, rows).data,
                            from.view().data,
                            from.view().bytes(),
                            cudaMemcpyDeviceToDevice));
  };
  copy_last(student, one.student);
  copy_last(teacher, one.teacher);
  copy_last(next, one.next);
  copy_last(weight, one.kl_weight);
  BIFOCAL_CUDA(cudaDeviceSynchronize());
  DistillLoss op;
  op.d_student = d_student.view;
  op.student = student.view;
  op.teacher = teacher.view;
  op.next = next.view;
  op.kl_weight = weight.view;
  op.ce_weight = weight.view;
  call(op);
  stream_.synchronize();
  const DeviceTensor last(DType::bf16, {1, size}, 0);
  BIFOCAL_CUDA(cudaMemcpy(last.view().data,
                          d_student.view.rows(rows - 1, rows).data,
                          last.view().bytes(),
                          cudaMemcpyDeviceToDevice));
  EXPECT_TRUE(last.download(stream_) == one.d_student.download(stream_));
}

}  // namespace
}  // namespace bifocal
