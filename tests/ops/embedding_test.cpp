// Embedding lookup and scatter-add.
#include "ops/embedding.h"

#include "support/op_test.h"

namespace bifocal::test {

namespace {

class Embedding : public OpTest {};

TEST_F(Embedding, CopiesRowsExactly) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const std::int64_t tokens : {0, 1, 17, 500}) {
      const Tensor table = normal(dtype, {29, 33}, 1);
      const Tensor ids = memory_.empty(Region::activations, DType::i32, {tokens});
      fill_below(ids, 2, 29);
      const Tensor y = empty(dtype, {tokens, 33});
      run(stream_, EmbeddingForward{y, ids, table});
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t id = ids.as<std::int32_t>()[t];
        EXPECT_SAME_BITS(y.rows(t, t + 1), table.rows(id, id + 1));
      }
    }
  }
}

TEST_F(Embedding, AddsGradientsInTokenOrder) {
  const std::int64_t tokens = 300;
  const Tensor d_y = normal(DType::f32, {tokens, 40}, 1);
  const Tensor ids = memory_.empty(Region::activations, DType::i32, {tokens});
  fill_below(ids, 2, 11);
  const Tensor d_table = normal(DType::f32, {11, 40}, 3);
  const Tensor want = normal(DType::f32, {11, 40}, 3);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t id = ids.as<std::int32_t>()[t];
    for (std::int64_t i = 0; i < 40; ++i) {
      want.as<float>()[id * 40 + i] += d_y.as<float>()[t * 40 + i];
    }
  }
  run(stream_, EmbeddingBackward{d_table, d_y, ids});
  EXPECT_SAME_BITS(d_table, want);
}

TEST_F(Embedding, GradientHasTheSameBitsForAnyNumberOfThreads) {
  const std::int64_t tokens = 2000;
  const Tensor d_y = normal(DType::f32, {tokens, 200}, 1);
  const Tensor ids = memory_.empty(Region::activations, DType::i32, {tokens});
  fill_below(ids, 2, 50);
  const Tensor want = zeros(DType::f32, {50, 200});
  with_threads(1, [&] { run(stream_, EmbeddingBackward{want, d_y, ids}); });
  for (const int threads : {2, 3, 5}) {
    const Tensor got = zeros(DType::f32, {50, 200});
    with_threads(threads, [&] { run(stream_, EmbeddingBackward{got, d_y, ids}); });
    EXPECT_SAME_BITS(got, want);
  }
}

TEST_F(Embedding, GradientMatchesFiniteDifferences) {
  const Tensor table = normal(DType::f64, {5, 4}, 1);
  const Tensor ids = tensor_of<std::int32_t>(memory_, {3, 0, 3, 4});
  const Tensor d_y = normal(DType::f64, {4, 4}, 2);
  const Tensor y = empty(DType::f64, {4, 4});
  const Tensor d_table = zeros(DType::f64, {5, 4});
  run(stream_, EmbeddingBackward{d_table, d_y, ids});
  EXPECT_GRADIENT(table, d_table, [&] {
    run(stream_, EmbeddingForward{y, ids, table});
    return weighted_sum(y, d_y);
  });
}

TEST_F(Embedding, RefusesIdsOutsideTheTable) {
  const Tensor table = normal(DType::f32, {5, 4}, 1);
  const Tensor y = empty(DType::f32, {2, 4});
  const Tensor above = tensor_of<std::int32_t>(memory_, {0, 5});
  const Tensor below = tensor_of<std::int32_t>(memory_, {-1, 0});
  const Tensor longer = tensor_of<std::int32_t>(memory_, {0, 1, 2});
  EXPECT_THROW(run(stream_, EmbeddingForward{y, above, table}), Error);
  EXPECT_THROW(run(stream_, EmbeddingBackward{table, y, below}), Error);
  EXPECT_THROW(run(stream_, EmbeddingForward{y, longer, table}), Error);
}

}  // namespace

}  // namespace bifocal::test
