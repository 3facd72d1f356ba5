// Losses on one chunk of logits and their gradient; the distance of stage 1.
#include "ops/distill_loss.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "distill_loss";
constexpr const char* kAlignWhere = "align_loss";

// What one id contributes, from the probabilities p of the teacher and q of the student and the log
// ratio r = log q - log p:
//   difference = q - p = p (e^r - 1),   divergence = p (e^r - 1 - r).
// The divergences of a row sum to KL(p || q), since p and q sum to 1. Each is at least 0 and
// exactly 0 at r = 0, and first-order errors of the two normalisers cancel in the sum, so that a
// small KL keeps its digits in float32.
template <class T>
struct Contribution {
  T difference, divergence;
};

inline Contribution<double> contribution(double p, double q, double r) {
  if (std::abs(r) < 0.5) {
    const double growth = std::expm1(r);
    return {p * growth, p * (growth - r)};
  }
  return {q - p, q - p - p * r};
}

inline Contribution<float> contribution(float p, float q, float r) {
  const float excess = r * r * exp_excess_ratio(r);
  const auto small = 0U - static_cast<std::uint32_t>(std::abs(r) < 0.34F);
  const auto select = [small](float yes, float no) {
    return std::bit_cast<float>((std::bit_cast<std::uint32_t>(yes) & small) |
                                (std::bit_cast<std::uint32_t>(no) & ~small));
  };
  return {select(p * (r + excess), q - p), select(p * excess, q - p - p * r)};
}

// A row's softmax at inverse temperature beta: probabilities e^(beta (x - largest)) / sum.
template <class T>
struct Softmax {
  T largest = 0;
  double sum = 1.0;

  T inverse_sum() const { return static_cast<T>(1.0 / sum); }
};

template <class T>
Softmax<T> softmax_of(const T* x, std::int64_t size, T largest, T beta) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) {
    sum += static_cast<double>(fast_exp((x[i] - largest) * beta));
  }
  return {largest, sum};
}

// The loss of one row: student (q), teacher (p), and the student at temperature 1 (plain).
template <class T>
struct Row {
  T* gradient;  // may be student
  const T* student;
  const T* teacher;
  std::int64_t size;
  T beta;
  Softmax<T> q, p, plain;
  T kl_factor, ce_factor;

  // KL(p || q). With kGradient writes kl_factor (q - p), with kCrossEntropy + ce_factor plain.
  template <bool kGradient, bool kCrossEntropy>
  double divergence() const {
    const Row row = *this;  // a copy whose members no store through gradient can change
    const T q_scale = q.inverse_sum();
    const T p_scale = p.inverse_sum();
    const T plain_scale = plain.inverse_sum() * ce_factor;
    const auto log_sums = static_cast<T>(std::log(q.sum) - std::log(p.sum));
    double kl = 0.0;
#pragma omp simd reduction(+ : kl)
    for (std::int64_t i = 0; i < row.size; ++i) {
      const T from_largest = row.student[i] - row.q.largest;
      const T q_log = from_largest * row.beta;
      const T p_log = (row.teacher[i] - row.p.largest) * row.beta;
      const auto part = contribution(
          fast_exp(p_log) * p_scale, fast_exp(q_log) * q_scale, (q_log - p_log) - log_sums);
      kl += static_cast<double>(part.divergence);
      if constexpr (kGradient) {
        T slope = row.kl_factor * part.difference;
        if constexpr (kCrossEntropy) {
          slope += fast_exp(from_largest) * plain_scale;
        }
        row.gradient[i] = slope;
      }
    }
    return kl;
  }

  void cross_entropy_gradient() const {
    const T scale = plain.inverse_sum() * ce_factor;
    const T largest = plain.largest;
    T* to = gradient;
    const T* from = student;
#pragma omp simd
    for (std::int64_t i = 0; i < size; ++i) {
      to[i] = fast_exp(from[i] - largest) * scale;
    }
  }
};

template <class T>
bool same_largest(const T* a, T largest_a, const T* b, T largest_b, std::int64_t size) {
  return std::find(a, a + size, largest_a) - a == std::find(b, b + size, largest_b) - b;
}

template <class T>
void distill_row(const DistillLoss& op, std::int64_t t) {
  const std::int64_t size = op.student.shape[1];
  const T* student = op.student.as<T>() + t * size;
  const T* teacher = op.teacher ? op.teacher.as<T>() + t * size : nullptr;
  T* gradient = op.d_student ? op.d_student.as<T>() + t * size : nullptr;
  const bool has_kl_weight = gradient != nullptr && teacher != nullptr;
  const double kl_weight = has_kl_weight ? op.kl_weight.as<double>()[t] : 0.0;
  const double ce_weight = op.ce_weight && gradient != nullptr ? op.ce_weight.as<double>()[t] : 0.0;
  const bool compares = teacher != nullptr && (op.kl || kl_weight != 0.0);
  const std::int64_t next = op.next ? op.next.as<std::int32_t>()[t] : -1;
  const bool predicts = next >= 0 && (op.ce || ce_weight != 0.0);
  const auto beta = static_cast<T>(1.0 / op.temperature);

  const T largest = row_max(student, size);
  const T teacher_largest = teacher != nullptr ? row_max(teacher, size) : T{0};
  if (op.agree) {
    op.agree.as<std::uint8_t>()[t] =
        same_largest(student, largest, teacher, teacher_largest, size) ? 1 : 0;
  }
  const Softmax<T> plain = predicts ? softmax_of(student, size, largest, T{1}) : Softmax<T>{};
  if (op.ce) {
    op.ce.as<double>()[t] =
        predicts ? std::log(plain.sum) + (static_cast<double>(largest) - student[next]) : 0.0;
  }
  Row<T> row{gradient,
             student,
             teacher,
             size,
             beta,
             {},
             {},
             plain,
             static_cast<T>(kl_weight * op.temperature),
             static_cast<T>(ce_weight)};
  if (compares) {
    const bool shared = predicts && op.temperature == 1.0;
    row.q = shared ? plain : softmax_of(student, size, largest, beta);
    row.p = softmax_of(teacher, size, teacher_largest, beta);
    const double kl = kl_weight == 0.0   ? row.template divergence<false, false>()
                      : ce_weight == 0.0 ? row.template divergence<true, false>()
                                         : row.template divergence<true, true>();
    if (op.kl) {
      op.kl.as<double>()[t] = op.temperature * op.temperature * kl;
    }
  }
  if (gradient == nullptr) {
    return;
  }
  if (kl_weight == 0.0 && ce_weight == 0.0) {
    std::fill_n(gradient, size, T{0});
  } else if (kl_weight == 0.0) {
    row.cross_entropy_gradient();
  }
  if (ce_weight != 0.0) {
    gradient[next] -= static_cast<T>(ce_weight);
  }
}

void require_next_ids(const DistillLoss& op) {
  const auto* next = op.next ? op.next.as<std::int32_t>() : nullptr;
  const auto* weight = op.ce_weight ? op.ce_weight.as<double>() : nullptr;
  for (std::int64_t t = 0; t < op.student.shape[0]; ++t) {
    const bool counts = weight != nullptr && weight[t] != 0.0;
    if (counts || (op.ce && next[t] >= 0)) {
      BIFOCAL_REQUIRE(next != nullptr && next[t] >= 0 && next[t] < op.student.shape[1],
                      "[{}] wanted next ids from 0 to {} where the cross entropy counts, got {} at "
                      "row {}: the tokens belong to another vocabulary",
                      kWhere,
                      op.student.shape[1] - 1,
                      next != nullptr ? next[t] : -1,
                      t);
    }
  }
}

template <class T>
void align(const AlignLoss& op) {
  const std::int64_t tokens = op.student.shape[0];
  const std::int64_t width = op.student.row_size();
  const auto* keep = op.keep.as<std::uint8_t>();
  std::vector<double> sums(static_cast<std::size_t>(2 * tokens), 0.0);
  parallel_ranges(tokens, 1, width / 2, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      T* gradient = op.d_student ? op.d_student.as<T>() + t * width : nullptr;
      if (keep[t] == 0) {
        std::fill_n(gradient, gradient == nullptr ? 0 : width, T{0});
        continue;
      }
      const T* student = op.student.as<T>() + t * width;
      const T* teacher = op.teacher.as<T>() + t * width;
      double error = 0.0;
      double energy = 0.0;
#pragma omp simd reduction(+ : error, energy)
      for (std::int64_t i = 0; i < width; ++i) {
        const auto difference = static_cast<double>(student[i] - teacher[i]);
        const auto target = static_cast<double>(teacher[i]);
        error += difference * difference;
        energy += target * target;
      }
      if (gradient != nullptr) {
#pragma omp simd
        for (std::int64_t i = 0; i < width; ++i) {
          gradient[i] = T{2} * (student[i] - teacher[i]);
        }
      }
      sums[static_cast<std::size_t>(2 * t)] = error;
      sums[static_cast<std::size_t>(2 * t + 1)] = energy;
    }
  });
  auto* totals = op.sums.as<double>();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    totals[i % 2] += sums[i];
  }
}

}  // namespace

void DistillLoss::check() const {
  const Shape matrix{student.shape[0], student.shape[1]};
  const Shape rows{student.shape[0]};
  require_tensor(kWhere, "student", student, student.dtype, matrix);
  BIFOCAL_REQUIRE(student.shape[1] > 0 && temperature > 0.0 && std::isfinite(temperature),
                  "[{}] wanted a vocabulary and a temperature above 0, got {} ids and {}: set "
                  "distill.temperature",
                  kWhere,
                  student.shape[1],
                  temperature);
  const auto optional =
      [&](const char* name, const ConstTensorView& x, DType type, const Shape& shape) {
        if (x) {
          require_tensor(kWhere, name, x, type, shape);
        }
      };
  const bool narrow = student.dtype == DType::f32 && d_student.dtype == DType::bf16;
  optional("d_student", d_student, narrow ? DType::bf16 : student.dtype, matrix);
  optional("teacher", teacher, student.dtype, matrix);
  optional("kl", kl, DType::f64, rows);
  optional("ce", ce, DType::f64, rows);
  optional("agree", agree, DType::u8, rows);
  optional("ce_weight", ce_weight, DType::f64, rows);
  BIFOCAL_REQUIRE(teacher || !(kl || agree),
                  "[{}] wanted teacher logits for kl and agree, got none: pass teacher",
                  kWhere);
  if (teacher && d_student) {
    require_tensor(kWhere, "kl_weight", kl_weight, DType::f64, rows);
  }
  if (ce || next) {
    require_tensor(kWhere, "next", next, DType::i32, rows);
  }
}

void AlignLoss::check() const {
  const Shape shape{student.shape[0], student.shape[1], student.shape[2]};
  require_tensor(kAlignWhere, "student", student, student.dtype, shape);
  require_tensor(kAlignWhere, "teacher", teacher, student.dtype, shape);
  require_tensor(kAlignWhere, "keep", keep, DType::u8, {student.shape[0]});
  require_tensor(kAlignWhere, "sums", sums, DType::f64, {2});
  if (d_student) {
    require_tensor(kAlignWhere, "d_student", d_student, student.dtype, shape);
  }
}

void run(CpuStream& stream, const DistillLoss& op) {
  if (run_widened(
          stream, op, [](auto& o) { return std::tie(o.d_student, o.student, o.teacher); })) {
    return;
  }
  require_next_ids(op);
  dispatch_real(kWhere, op.student.dtype, [&]<class T>(T) {
    const std::int64_t nanoseconds = 100 + 2 * op.student.shape[1];
    parallel_ranges(op.student.shape[0], 1, nanoseconds, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        distill_row<T>(op, t);
      }
    });
  });
}

void run(CpuStream& stream, const AlignLoss& op) {
  if (run_widened(
          stream, op, [](auto& o) { return std::tie(o.d_student, o.student, o.teacher); })) {
    return;
  }
  dispatch_real(kAlignWhere, op.student.dtype, [&]<class T>(T) { align<T>(op); });
}

}  // namespace bifocal
