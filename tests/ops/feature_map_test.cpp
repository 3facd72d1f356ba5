// Softmax features against plain loops and finite differences.
#include "ops/feature_map.h"

#include "core/memory.h"
#include "support/fill.h"
#include "support/gradient_check.h"

namespace bifocal::test {

namespace {

struct Sizes {
  std::int64_t tokens, heads, x_heads, dim;
};

std::vector<Sizes> sizes() {
  return {{1, 1, 1, 1}, {130, 4, 4, 8}, {67, 6, 2, 5}, {3, 2, 1, 64}, {0, 2, 1, 4}};
}

struct Case {
  Memory memory;
  Tensor x, weight, y, d_y, d_x, d_weight;

  Case(const Sizes& s, DType dtype) {
    x = normal_tensor(memory, dtype, {s.tokens, s.x_heads, s.dim}, 1);
    weight = normal_tensor(memory, dtype, {s.heads, s.dim, s.dim}, 2, 0.5);
    y = memory.empty(Region::activations, dtype, {s.tokens, s.heads, s.dim});
    d_y = normal_tensor(memory, dtype, {s.tokens, s.heads, s.dim}, 3);
    d_x = normal_tensor(memory, dtype, {s.tokens, s.x_heads, s.dim}, 4);
    d_weight = normal_tensor(memory, dtype, {s.heads, s.dim, s.dim}, 5);
  }

  void forward() const {
    const FeatureMapForward op{.y = y, .x = x, .weight = weight};
    op.check();
    CpuStream stream;
    run(stream, op);
  }

  void backward() const {
    const FeatureMapBackward op{
        .d_x = d_x, .d_weight = d_weight, .d_y = d_y, .y = y, .x = x, .weight = weight};
    op.check();
    CpuStream stream;
    run(stream, op);
  }
};

// Plain loops in double over the stored inputs.
std::vector<double> definition(const Case& c, const Sizes& s) {
  const auto x = to_doubles(c.x);
  const auto weight = to_doubles(c.weight);
  std::vector<double> y(static_cast<std::size_t>(s.tokens * s.heads * s.dim));
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t head = 0; head < s.heads; ++head) {
      const std::int64_t from = (t * s.x_heads + head / (s.heads / s.x_heads)) * s.dim;
      double* out = y.data() + (t * s.heads + head) * s.dim;
      double sum = 0;
      for (std::int64_t a = 0; a < s.dim; ++a) {
        double z = 0;
        for (std::int64_t b = 0; b < s.dim; ++b) {
          z += weight[static_cast<std::size_t>((head * s.dim + a) * s.dim + b)] *
               x[static_cast<std::size_t>(from + b)];
        }
        out[a] = std::exp(z);
        sum += out[a];
      }
      for (std::int64_t a = 0; a < s.dim; ++a) {
        out[a] /= sum;
      }
    }
  }
  return y;
}

TEST(FeatureMap, MatchesPlainLoops) {
  for (const Sizes& s : sizes()) {
    const Case exact(s, DType::f64);
    exact.forward();
    EXPECT_CLOSE(exact.y, definition(exact, s), 1e-14);
    const Case single(s, DType::f32);
    single.forward();
    // Logits of size up to about 15 carry 15 * 6e-8, and so does their exponential.
    EXPECT_CLOSE(single.y, definition(single, s), 3e-6);
  }
}

void subtract(const Tensor& x, const Tensor& y) {
  std::transform(x.as<double>(),
                 x.as<double>() + x.size(),
                 y.as<double>(),
                 x.as<double>(),
                 [](double a, double b) { return a - b; });
}

TEST(FeatureMap, GradientMatchesFiniteDifferencesAndIsAdded) {
  for (const Sizes& s : sizes()) {
    Case c(s, DType::f64);
    const Tensor d_x_before = copy_as(c.memory, DType::f64, c.d_x);
    const Tensor d_weight_before = copy_as(c.memory, DType::f64, c.d_weight);
    c.forward();
    c.backward();
    subtract(c.d_x, d_x_before);
    subtract(c.d_weight, d_weight_before);
    const auto loss = [&] {
      c.forward();
      return weighted_sum(c.y, c.d_y);
    };
    EXPECT_GRADIENT(c.x, c.d_x, loss);
    EXPECT_GRADIENT(c.weight, c.d_weight, loss);
  }
}

TEST(FeatureMap, FloatGradientsMatchDouble) {
  for (const Sizes& s : sizes()) {
    Case single(s, DType::f32);
    single.forward();
    single.backward();
    Case exact(s, DType::f64);
    exact.x = copy_as(exact.memory, DType::f64, single.x);
    exact.weight = copy_as(exact.memory, DType::f64, single.weight);
    exact.d_y = copy_as(exact.memory, DType::f64, single.d_y);
    exact.forward();
    exact.backward();
    // Sums over up to 130 tokens and 64 features at 6e-8 each, features off by 3e-6 at worst.
    EXPECT_CLOSE(single.d_x, exact.d_x, 5e-6);
    EXPECT_CLOSE(single.d_weight, exact.d_weight, 5e-6);
  }
}

TEST(FeatureMap, RefusesHeadsThatDoNotDivide) {
  Case c({3, 3, 2, 4}, DType::f32);
  EXPECT_THROW(c.forward(), Error);
}

}  // namespace

}  // namespace bifocal::test
