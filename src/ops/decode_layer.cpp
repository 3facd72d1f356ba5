// A layer's ops one after another: on a CPU nothing is gained by joining them.
#include "ops/decode_layer.h"

#include <vector>

#include "ops/bifocal_gate.h"
#include "ops/decode_attention.h"
#include "ops/decode_linear.h"
#include "ops/elementwise.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace bifocal {

namespace {

// Rows between two ops.
class Rows {
 public:
  Rows(DType dtype, const Shape& shape)
      : numbers_((static_cast<std::size_t>(shape.size()) * size_of(dtype) + 7) / 8),
        view_{numbers_.data(), dtype, shape} {}

  TensorView view() const { return view_; }

 private:
  std::vector<double> numbers_;  // for their alignment
  TensorView view_;
};

// Matrices may be bfloat16 beside float32.
void require_matrix(const char* where,
                    const char* name,
                    const ConstTensorView& weight,
                    DType type,
                    const Shape& shape) {
  const bool is_narrow = weight.dtype == DType::bf16 && type == DType::f32;
  require_tensor(where, name, weight, is_narrow ? DType::bf16 : type, shape);
}

void require_optional(const char* where,
                      const char* name,
                      const ConstTensorView& tensor,
                      DType type,
                      const Shape& shape) {
  if (tensor) {
    require_tensor(where, name, tensor, type, shape);
  }
}

template <class View>
void require_caches(const char* where, std::span<const View> caches, DType type, const Shape& k) {
  BIFOCAL_REQUIRE(static_cast<std::int64_t>(caches.size()) == k[0],
                  "[{}] wanted a cache for each of {} rows, got {}",
                  where,
                  k[0],
                  caches.size());
  for (const View& cache : caches) {
    require_tensor(where, "cache", cache, type, {cache.shape[0], k[1] * k[2]});
  }
}

// x, or its RMSNorm in `rows`.
ConstTensorView normed(CpuStream& stream,
                       const ConstTensorView& x,
                       const ConstTensorView& norm,
                       double eps,
                       const Rows& rows) {
  if (!norm) {
    return x;
  }
  run(stream, RmsNormForward{.y = rows.view(), .x = x, .weight = norm, .eps = eps});
  return rows.view();
}

// Norm and rotation of a copy.
void rotate(CpuStream& stream,
            const DecodeHeads& op,
            const TensorView& y,
            const ConstTensorView& x,
            const ConstTensorView& norm) {
  const Shape flat{x.shape[0] * x.shape[1], x.shape[2]};
  if (norm) {
    run(stream,
        RmsNormForward{.y = y.reshape(flat), .x = x.reshape(flat), .weight = norm, .eps = op.eps});
  } else {
    run(stream, Cast{.y = y, .x = x});
  }
  run(stream, RopeRotate{.x = y, .cos = op.cos, .sin = op.sin});
}

void attend(CpuStream& stream, const DecodeMixer::Near& near, const TensorView& out) {
  std::vector<ConstTensorView> keys;
  std::vector<ConstTensorView> values;
  for (std::size_t row = 0; row < near.k.size(); ++row) {
    const std::int64_t length = near.lengths.as<std::int32_t>()[row];
    keys.push_back(near.k[row].rows(0, length));
    values.push_back(near.v[row].rows(0, length));
  }
  run(stream, DecodeAttention{.out = out, .q = near.q, .k = keys, .v = values, .sink = near.sink});
}

void recall(CpuStream& stream, const DecodeMixer::Far& far, const TensorView& h) {
  run(stream,
      MlstmStep{.h = h,
                .c = far.c,
                .n = far.n,
                .m = far.m,
                .q = far.q,
                .k = far.k,
                .v = far.v,
                .i_gate = far.i_gate,
                .f_gate = far.f_gate,
                .sequences = far.sequences});
}

}  // namespace

void DecodeEmbedding::check() const {
  const char* where = "decode_embedding";
  const Shape shape{ids.shape[0], table.shape[1]};
  require_tensor(where, "ids", ids, DType::i32, {ids.shape[0]});
  require_matrix(where, "table", table, y.dtype, {table.shape[0], table.shape[1]});
  require_tensor(where, "y", y, y.dtype, shape);
}

void DecodeProducts::check() const {
  const char* where = "decode_products";
  BIFOCAL_REQUIRE(x.shape.rank() == 2 && products.size() <= kMost,
                  "[{}] wanted x [rows, in] and at most {} products, got {} and {}",
                  where,
                  kMost,
                  to_string(x.shape),
                  products.size());
  require_optional(where, "norm", norm, x.dtype, {x.shape[1]});
  for (const DecodeProduct& product : products) {
    const DType type = product.y.dtype == sum_type(x.dtype) ? sum_type(x.dtype) : x.dtype;
    const std::int64_t out = product.weight.shape[0];
    require_matrix(where, "weight", product.weight, x.dtype, {out, x.shape[1]});
    require_tensor(where, "y", product.y, type, {x.shape[0], out});
    require_optional(where, "bias", product.bias, x.dtype, {out});
    require_optional(where, "add", product.add, type, {x.shape[0], out});
  }
}

void DecodeGatedProduct::check() const {
  const char* where = "decode_gated_product";
  require_tensor(where, "x", x, x.dtype, {x.shape[0], gate.shape[1]});
  require_tensor(where, "norm", norm, x.dtype, {x.shape[1]});
  require_matrix(where, "gate", gate, x.dtype, {gate.shape[0], x.shape[1]});
  require_tensor(where, "up", up, gate.dtype, gate.shape);
  require_tensor(where, "y", y, x.dtype, {x.shape[0], gate.shape[0]});
}

void DecodeHeads::check() const {
  const char* where = "decode_heads";
  const DType type = q.dtype;
  const Shape& shape = projected_q.shape;
  const Shape& keys = projected_k.shape;
  BIFOCAL_REQUIRE(shape.rank() == 3 && keys.rank() == 3 && shape[2] % 2 == 0,
                  "[{}] wanted queries and keys [rows, heads, head_dim] of even width, got {} and "
                  "{}",
                  where,
                  to_string(shape),
                  to_string(keys));
  const std::int64_t dim = shape[2];
  require_tensor(where, "projected_q", projected_q, type, shape);
  require_tensor(where, "q", q, type, shape);
  require_tensor(where, "projected_k", projected_k, type, {shape[0], keys[1], dim});
  require_tensor(where, "v", v, type, keys);
  require_optional(where, "q_norm", q_norm, type, {dim});
  require_optional(where, "k_norm", k_norm, type, {dim});
  require_tensor(where, "cos", cos, sum_type(type), {shape[0], dim / 2});
  require_tensor(where, "sin", sin, sum_type(type), {shape[0], dim / 2});
  if (!k_cache.empty()) {
    require_caches(where, k_cache, type, keys);
    require_caches(where, v_cache, type, keys);
    require_tensor(where, "places", places, DType::i32, {shape[0]});
  }
  if (feature_q) {
    const std::int64_t states = feature_k.shape[1];
    require_tensor(where, "feature_q", feature_q, type, shape);
    require_tensor(where, "feature_k", feature_k, type, {shape[0], states, dim});
    require_matrix(where, "feature_q_weight", feature_q_weight, type, {shape[1], dim, dim});
    require_matrix(where, "feature_k_weight", feature_k_weight, type, {states, dim, dim});
  }
}

void DecodeMixer::check() const {
  const char* where = "decode_mixer";
  const DType type = y.dtype;
  const Shape& shape = y.shape;
  require_tensor(where, "y", y, type, {shape[0], shape[1], shape[2]});
  BIFOCAL_REQUIRE(near.q || far.q, "[{}] wanted a near or a far branch, got none", where);
  require_optional(where, "gate", gate, sum_type(type), {shape[0], shape[1]});
  if (near.q) {
    require_tensor(where, "q", near.q, type, shape);
    const std::int64_t width = near.k.empty() ? 0 : near.k.front().shape[1];
    const Shape keys{shape[0], width / shape[2], shape[2]};
    require_caches(where, near.k, type, keys);
    require_caches(where, near.v, type, keys);
    require_tensor(where, "lengths", near.lengths, DType::i32, {shape[0]});
    require_optional(where, "newest", near.newest, DType::i32, {shape[0]});
    require_optional(where, "sink", near.sink, type, {shape[1]});
  }
  if (far.q) {
    MlstmStep{.h = y,
              .c = far.c,
              .n = far.n,
              .m = far.m,
              .q = far.q,
              .k = far.k,
              .v = far.v,
              .i_gate = far.i_gate,
              .f_gate = far.f_gate,
              .sequences = far.sequences}
        .check();
  }
  require_optional(where,
                   "workspace",
                   workspace,
                   DType::f32,
                   {decode_mixer_workspace(shape[0], shape[1], shape[2])});
}

// kDecodeSplits parts of a row's slots, each with sums of the values, the largest logit and the sum
// of exponentials; and what the far branch reads.
std::int64_t decode_mixer_workspace(std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  return rows * heads * (kDecodeSplits * (head_dim + 2) + head_dim);
}

void run(CpuStream& stream, const DecodeEmbedding& op) {
  const auto* ids = op.ids.as<std::int32_t>();
  for (std::int64_t row = 0; row < op.ids.size(); ++row) {
    BIFOCAL_REQUIRE(ids[row] >= 0 && ids[row] < op.table.shape[0],
                    "[decode_embedding] wanted ids from 0 to {}, got {}: the tokens belong to "
                    "another vocabulary",
                    op.table.shape[0] - 1,
                    ids[row]);
    run(stream, Cast{.y = op.y.rows(row, row + 1), .x = op.table.rows(ids[row], ids[row] + 1)});
  }
}

void run(CpuStream& stream, const DecodeProducts& op) {
  const Rows rows(op.x.dtype, op.x.shape);
  const ConstTensorView x = normed(stream, op.x, op.norm, op.eps, rows);
  for (const DecodeProduct& product : op.products) {
    if (!product.add) {
      run(stream,
          DecodeLinear{.y = product.y, .x = x, .weight = product.weight, .bias = product.bias});
      continue;
    }
    const Rows sums(product.y.dtype, product.y.shape);
    run(stream,
        DecodeLinear{.y = sums.view(), .x = x, .weight = product.weight, .bias = product.bias});
    run(stream, Add{.y = product.y, .a = sums.view(), .b = product.add});
  }
}

void run(CpuStream& stream, const DecodeGatedProduct& op) {
  const Rows rows(op.x.dtype, op.x.shape);
  const Rows gate(op.y.dtype, op.y.shape);
  const ConstTensorView x = normed(stream, op.x, op.norm, op.eps, rows);
  run(stream, DecodeLinear{.y = gate.view(), .x = x, .weight = op.gate});
  run(stream, DecodeLinear{.y = op.y, .x = x, .weight = op.up});
  run(stream, SwigluForward{.y = op.y, .gate = gate.view(), .up = op.y});
}

void run(CpuStream& stream, const DecodeHeads& op) {
  const Rows k(op.q.dtype, op.projected_k.shape);
  rotate(stream, op, op.q, op.projected_q, op.q_norm);
  rotate(stream, op, k.view(), op.projected_k, op.k_norm);
  const Shape flat{op.v.shape[0], op.v.shape[1] * op.v.shape[2]};
  for (std::size_t row = 0; row < op.k_cache.size(); ++row) {
    const auto at = static_cast<std::int64_t>(row);
    const auto write = [&](const TensorView& cache, const ConstTensorView& rows) {
      run(stream,
          CacheWrite{.cache = cache,
                     .rows = rows.reshape(flat).rows(at, at + 1),
                     .slots = op.places.rows(at, at + 1)});
    };
    write(op.k_cache[row], k.view());
    write(op.v_cache[row], op.v);
  }
  if (op.feature_q) {
    run(stream, DecodeFeatureMap{.y = op.feature_q, .x = op.q, .weight = op.feature_q_weight});
    run(stream, DecodeFeatureMap{.y = op.feature_k, .x = k.view(), .weight = op.feature_k_weight});
  }
}

void run(CpuStream& stream, const DecodeMixer& op) {
  if (!op.far.q) {
    attend(stream, op.near, op.y);
    return;
  }
  if (!op.near.q) {
    recall(stream, op.far, op.y);
    return;
  }
  const Rows far(op.y.dtype, op.y.shape);
  const Rows near(op.y.dtype, op.y.shape);
  recall(stream, op.far, far.view());
  attend(stream, op.near, near.view());
  if (op.gate) {
    run(stream,
        BifocalGateForward{.y = op.y, .far = far.view(), .near = near.view(), .gate = op.gate});
  } else {
    run(stream, Add{.y = op.y, .a = near.view(), .b = far.view()});
  }
}

}  // namespace bifocal
