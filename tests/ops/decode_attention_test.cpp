// Attention of single queries over caches.
#include "ops/decode_attention.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Decode : public OpTest {
 protected:
  // Four rows with caches of different lengths, one of them empty.
  struct Case {
    Tensor out, q, sink;
    std::vector<Tensor> k, v;
    std::vector<ConstTensorView> keys, values;
  };

  Case make(DType dtype, std::int64_t kv_heads, std::int64_t head_dim) {
    const std::int64_t heads = 6;
    const std::vector<std::int64_t> counts = {19, 1, 0, 8};
    Case c{empty(dtype, {4, heads, head_dim}),
           normal(dtype, {4, heads, head_dim}, 1, 2.0),
           normal(dtype, {heads}, 4),
           {},
           {},
           {},
           {}};
    for (std::size_t row = 0; row < counts.size(); ++row) {
      c.k.push_back(normal(dtype, {counts[row], kv_heads * head_dim}, 10 + row));
      c.v.push_back(normal(dtype, {counts[row], kv_heads * head_dim}, 20 + row));
      c.keys.emplace_back(c.k.back());
      c.values.emplace_back(c.v.back());
    }
    return c;
  }

  static DecodeAttention op(const Case& c, bool with_sink) {
    DecodeAttention attention{c.out, c.q, c.keys, c.values, {}};
    if (with_sink) {
      attention.sink = c.sink;
    }
    return attention;
  }
};

std::vector<double> definition(const DecodeAttention& op) {
  const auto q = to_doubles(op.q);
  const std::int64_t heads = op.q.shape[1];
  const std::int64_t d = op.q.shape[2];
  const std::int64_t kv_heads = op.k[0].shape[1] / d;
  std::vector<double> out(q.size(), 0.0);
  for (std::int64_t row = 0; row < op.q.shape[0] * heads; ++row) {
    const auto b = static_cast<std::size_t>(row / heads);
    const auto k = to_doubles(op.k[b]);
    const auto v = to_doubles(op.v[b]);
    const std::int64_t group = row % heads / (heads / kv_heads);
    double total =
        op.sink ? std::exp(to_doubles(op.sink)[static_cast<std::size_t>(row % heads)]) : 0.0;
    std::vector<double> mean(static_cast<std::size_t>(d), 0.0);
    for (std::int64_t slot = 0; slot < op.k[b].shape[0]; ++slot) {
      const std::int64_t at = (slot * kv_heads + group) * d;
      double logit = 0.0;
      for (std::int64_t i = 0; i < d; ++i) {
        logit += q[static_cast<std::size_t>(row * d + i)] * k[static_cast<std::size_t>(at + i)];
      }
      const double weight = std::exp(logit / std::sqrt(static_cast<double>(d)));
      total += weight;
      for (std::int64_t i = 0; i < d; ++i) {
        mean[static_cast<std::size_t>(i)] += weight * v[static_cast<std::size_t>(at + i)];
      }
    }
    for (std::int64_t i = 0; i < d && total > 0.0; ++i) {
      out[static_cast<std::size_t>(row * d + i)] = mean[static_cast<std::size_t>(i)] / total;
    }
  }
  return out;
}

TEST_F(Decode, MatchesDefinition) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t kv_heads : {1, 2, 6}) {
      for (const std::int64_t head_dim : {1, 15, 32}) {
        for (const bool with_sink : {false, true}) {
          const Case c = make(dtype, kv_heads, head_dim);
          run(stream_, op(c, with_sink));
          // Logits up to 10 rounded to float32: 1e-6 in their exponentials.
          EXPECT_CLOSE(c.out, definition(op(c, with_sink)), dtype == DType::f32 ? 2e-6 : 1e-13);
        }
      }
    }
  }
}

TEST_F(Decode, EmptyCachesGiveZero) {
  const Case c = make(DType::f32, 2, 8);
  for (const bool with_sink : {false, true}) {
    run(stream_, op(c, with_sink));
    EXPECT_SAME_BITS(c.out.rows(2, 3), zeros(DType::f32, {1, 6, 8}));
  }
}

TEST_F(Decode, ARowHasTheSameBitsAlone) {
  const Case c = make(DType::f32, 2, 32);
  run(stream_, op(c, true));
  for (std::int64_t row = 0; row < 4; ++row) {
    const auto at = static_cast<std::size_t>(row);
    const Tensor alone = empty(DType::f32, {1, 6, 32});
    run(stream_,
        DecodeAttention{
            alone, c.q.rows(row, row + 1), {&c.keys[at], 1}, {&c.values[at], 1}, c.sink});
    EXPECT_SAME_BITS(alone, c.out.rows(row, row + 1));
  }
}

TEST_F(Decode, HugeLogitsAndSinksStayFinite) {
  const Case c = make(DType::f32, 2, 8);
  fill_normal(c.q, 1, 1e4);
  fill(c.sink, [](std::int64_t head) { return head % 2 == 0 ? 1e5 : -1e5; });
  run(stream_, op(c, true));
  for (const double value : to_doubles(c.out)) {
    EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_F(Decode, CacheCopiesTouchTheNamedSlotsAndNoOther) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Tensor cache = normal(dtype, {5, 6}, 1);
    const Tensor want = copy_as(memory_, dtype, cache);
    const Tensor rows = normal(dtype, {2, 6}, 2);
    const Tensor slots = tensor_of<std::int32_t>(memory_, {3, 0});
    run(stream_, CacheWrite{cache, rows, slots});
    std::memcpy(want.rows(3, 4).data, rows.rows(0, 1).data, 6 * size_of(dtype));
    std::memcpy(want.rows(0, 1).data, rows.rows(1, 2).data, 6 * size_of(dtype));
    EXPECT_SAME_BITS(cache, want);
    const Tensor read = empty(dtype, {2, 6});
    run(stream_, CacheRead{read, cache, slots});
    EXPECT_SAME_BITS(read, rows);
  }
}

TEST_F(Decode, CacheCopiesRefuseSlotsOutsideTheCacheAndOtherShapes) {
  const Tensor cache = normal(DType::f32, {4, 6}, 1);
  const Tensor rows = normal(DType::f32, {2, 6}, 2);
  const auto write = [&](const ConstTensorView& from, const std::vector<std::int32_t>& slots) {
    run(stream_, CacheWrite{cache, from, tensor_of<std::int32_t>(memory_, slots)});
  };
  EXPECT_NO_THROW(write(rows, {3, 0}));
  EXPECT_THROW(write(rows, {4, 0}), Error);
  EXPECT_THROW(write(rows, {-1, 0}), Error);
  EXPECT_THROW(write(rows, {0}), Error);
  EXPECT_THROW(write(normal(DType::f32, {2, 5}, 2), {0, 0}), Error);
  EXPECT_THROW(write(normal(DType::f64, {2, 6}, 2), {0, 0}), Error);
  EXPECT_THROW(run(stream_, CacheRead{rows, cache, tensor_of<std::int32_t>(memory_, {0, 4})}),
               Error);
}

TEST_F(Decode, RefusesMissingCachesAndUnevenHeads) {
  Case c = make(DType::f32, 2, 8);
  c.values.pop_back();
  EXPECT_THROW(run(stream_, op(c, false)), Error);
  c.keys.pop_back();
  EXPECT_THROW(run(stream_, op(c, false)), Error);
  EXPECT_THROW(run(stream_, op(make(DType::f32, 4, 8), false)), Error);
}

// Enough work for the threads to share it.
TEST_F(Decode, ThreadsDoNotChangeABit) {
  const Tensor q = normal(DType::f32, {2, 6, 32}, 1);
  const Tensor first_k = normal(DType::f32, {900, 64}, 2);
  const Tensor first_v = normal(DType::f32, {900, 64}, 3);
  const Tensor second_k = normal(DType::f32, {700, 64}, 4);
  const Tensor second_v = normal(DType::f32, {700, 64}, 5);
  const std::vector<ConstTensorView> keys = {first_k, second_k};
  const std::vector<ConstTensorView> values = {first_v, second_v};
  const Tensor one = empty(DType::f32, {2, 6, 32});
  const Tensor three = empty(DType::f32, {2, 6, 32});
  with_threads(1, [&] { run(stream_, DecodeAttention{one, q, keys, values, {}}); });
  with_threads(3, [&] { run(stream_, DecodeAttention{three, q, keys, values, {}}); });
  EXPECT_SAME_BITS(three, one);
}

}  // namespace

}  // namespace bifocal::test
