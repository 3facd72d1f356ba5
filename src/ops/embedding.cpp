// Token embedding: rows are copied by tokens, gradients added by columns.
#include "ops/embedding.h"

#include <algorithm>

#include "ops/vector_math.h"
#include "ops/widened.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "embedding";

void require_ids(const ConstTensorView& ids, std::int64_t vocabulary) {
  const auto* id = ids.as<std::int32_t>();
  for (std::int64_t t = 0; t < ids.size(); ++t) {
    BIFOCAL_REQUIRE(id[t] >= 0 && id[t] < vocabulary,
                    "[{}] wanted ids from 0 to {}, got {} at token {}: the tokens belong to "
                    "another vocabulary",
                    kWhere,
                    vocabulary - 1,
                    id[t],
                    t);
  }
}

template <class T>
void forward(const EmbeddingForward& op) {
  const std::int64_t width = op.table.shape[1];
  T* y = op.y.as<T>();
  const T* table = op.table.as<T>();
  const auto* ids = op.ids.as<std::int32_t>();
  parallel_ranges(op.ids.size(), 1, width / 4, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      std::copy_n(table + ids[t] * width, width, y + t * width);
    }
  });
}

// A thread owns columns, hence sees all tokens in order however many threads there are.
template <class T>
void backward(const EmbeddingBackward& op) {
  constexpr std::int64_t kCacheLine = 16;
  const std::int64_t width = op.d_table.shape[1];
  const std::int64_t tokens = op.ids.size();
  T* d_table = op.d_table.as<T>();
  const T* d_y = op.d_y.as<T>();
  const auto* ids = op.ids.as<std::int32_t>();
  parallel_ranges(width, kCacheLine, tokens / 2, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      axpy(d_table + ids[t] * width + begin, T{1}, d_y + t * width + begin, end - begin);
    }
  });
}

}  // namespace

void EmbeddingForward::check() const {
  const Shape shape{ids.shape[0], table.shape[1]};
  require_tensor(kWhere, "ids", ids, DType::i32, {ids.shape[0]});
  require_tensor(kWhere, "table", table, y.dtype, {table.shape[0], table.shape[1]});
  require_tensor(kWhere, "y", y, y.dtype, shape);
}

void EmbeddingBackward::check() const {
  require_tensor(kWhere, "ids", ids, DType::i32, {ids.shape[0]});
  const Shape shape{d_table.shape[0], d_table.shape[1]};
  require_tensor(kWhere, "d_table", d_table, sum_type(d_y.dtype), shape);
  require_tensor(kWhere, "d_y", d_y, d_y.dtype, {ids.shape[0], d_table.shape[1]});
}

void run(CpuStream& stream, const EmbeddingForward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.y, o.table); })) {
    return;
  }
  require_ids(op.ids, op.table.shape[0]);
  dispatch_real(kWhere, op.y.dtype, [&]<class T>(T) { forward<T>(op); });
}

void run(CpuStream& stream, const EmbeddingBackward& op) {
  if (run_widened(stream, op, [](auto& o) { return std::tie(o.d_table, o.d_y); })) {
    return;
  }
  require_ids(op.ids, op.d_table.shape[0]);
  dispatch_real(kWhere, op.d_y.dtype, [&]<class T>(T) { backward<T>(op); });
}

}  // namespace bifocal
