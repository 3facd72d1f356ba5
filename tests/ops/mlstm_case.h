// Random mLSTM problems of packed documents, their results and gradients, for the mLSTM's tests.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "core/memory.h"
#include "ops/mlstm.h"
#include "ops/vector_math.h"
#include "support/compare.h"
#include "support/fill.h"

namespace bifocal::test {

struct MlstmShape {
  std::int64_t heads = 4, states = 2, v_heads = 2, head_dim = 5;
};

enum class MlstmPath { definition, chunkwise };

// Whether the first document began before the row and brings a state.
enum class MlstmStart { fresh, carried };

inline Tensor empty(Memory& memory, DType dtype, const Shape& shape) {
  return memory.empty(Region::activations, dtype, shape);
}

struct MlstmOutputs {
  Tensor h, c, n, m;

  MlstmState final() const { return {.c = c, .n = n, .m = m}; }
};

struct MlstmGradients {
  Tensor q, k, v, i_gate, f_gate, c, n;
};

class MlstmCase {
 public:
  MlstmCase(const MlstmShape& shape,
            const std::vector<std::int64_t>& documents,
            MlstmStart start,
            std::uint64_t seed = 1)
      : memory_(std::make_shared<Memory>()), shape_(shape), dtype_(DType::f64) {
    std::vector<std::uint8_t> flags;
    for (const std::int64_t length : documents) {
      for (std::int64_t t = 0; t < length; ++t) {
        flags.push_back(t == 0 && !(flags.empty() && start == MlstmStart::carried) ? 1 : 0);
      }
    }
    tokens_ = static_cast<std::int64_t>(flags.size());
    starts = tensor_of(*memory_, flags);
    const auto& s = shape_;
    q = features({tokens_, s.heads, s.head_dim}, seed);
    k = features({tokens_, s.states, s.head_dim}, seed + 100);
    v = normal({tokens_, s.v_heads, s.head_dim}, seed + 200);
    i_gate = normal({tokens_, s.states}, seed + 300);
    f_gate = normal({tokens_, s.states}, seed + 400);
    fill_normal(f_gate, seed + 400, 1.5, 2.0);
    if (start == MlstmStart::carried) {
      c = normal({s.states, s.head_dim, s.head_dim}, seed + 500);
      n = features({s.states, s.head_dim}, seed + 600);
      m = normal({s.states}, seed + 700);
    }
    d_h = normal({tokens_, s.heads, s.head_dim}, seed + 800);
    d_final_c = normal({s.states, s.head_dim, s.head_dim}, seed + 900);
    d_final_n = normal({s.states, s.head_dim}, seed + 1000);
  }

  // The same numbers rounded to float, in tensors of `dtype` of the same memory.
  MlstmCase rounded(DType dtype) const {
    MlstmCase result(*this, dtype);
    for (const auto member : kReals) {
      if (this->*member) {
        const Tensor single = copy_as(*memory_, DType::f32, this->*member);
        result.*member = copy_as(*result.memory_, dtype, single);
      }
    }
    return result;
  }

  Memory& memory() const { return *memory_; }

  DType dtype() const { return dtype_; }

  std::int64_t tokens() const { return tokens_; }

  const MlstmShape& shape() const { return shape_; }

  // Tokens [begin, end) after a given state; the empty one where left out.
  MlstmInputs shard(std::int64_t begin, std::int64_t end, const ConstMlstmState& initial) const {
    return {.q = q.rows(begin, end),
            .k = k.rows(begin, end),
            .v = v.rows(begin, end),
            .i_gate = i_gate.rows(begin, end),
            .f_gate = f_gate.rows(begin, end),
            .starts = starts.rows(begin, end),
            .initial = initial};
  }

  MlstmInputs inputs() const {
    return shard(
        0, tokens_, c ? ConstMlstmState(MlstmState{.c = c, .n = n, .m = m}) : ConstMlstmState());
  }

  MlstmOutputs empty_outputs() const {
    const auto& s = shape_;
    return {.h = empty(*memory_, dtype_, {tokens_, s.heads, s.head_dim}),
            .c = empty(*memory_, dtype_, {s.states, s.head_dim, s.head_dim}),
            .n = empty(*memory_, dtype_, {s.states, s.head_dim}),
            .m = empty(*memory_, dtype_, {s.states})};
  }

  MlstmOutputs forward(MlstmPath path) const {
    MlstmOutputs out = empty_outputs();
    const MlstmForward op{.h = out.h, .final = out.final(), .inputs = inputs()};
    op.check();
    if (path == MlstmPath::definition) {
      mlstm_definition(op);
    } else {
      CpuStream stream;
      run(stream, op);
    }
    return out;
  }

  MlstmGradients empty_gradients() const {
    const auto& s = shape_;
    return {.q = empty(*memory_, dtype_, q.shape()),
            .k = empty(*memory_, dtype_, k.shape()),
            .v = empty(*memory_, dtype_, v.shape()),
            .i_gate = empty(*memory_, dtype_, i_gate.shape()),
            .f_gate = empty(*memory_, dtype_, f_gate.shape()),
            .c = empty(*memory_, dtype_, {s.states, s.head_dim, s.head_dim}),
            .n = empty(*memory_, dtype_, {s.states, s.head_dim})};
  }

  // With gradients of the final state, and of the initial one where there is one.
  MlstmGradients backward(MlstmPath path, const ConstTensorView& h) const {
    MlstmGradients out = empty_gradients();
    MlstmBackward op{.d_q = out.q,
                     .d_k = out.k,
                     .d_v = out.v,
                     .d_i_gate = out.i_gate,
                     .d_f_gate = out.f_gate,
                     .d_initial_c = {},
                     .d_initial_n = {},
                     .d_h = d_h,
                     .h = h,
                     .d_final_c = d_final_c,
                     .d_final_n = d_final_n,
                     .inputs = inputs()};
    if (c) {
      op.d_initial_c = out.c;
      op.d_initial_n = out.n;
    } else {
      out.c = {};
      out.n = {};
    }
    op.check();
    if (path == MlstmPath::definition) {
      mlstm_definition(op);
    } else {
      CpuStream stream;
      run(stream, op);
    }
    return out;
  }

 private:
  std::shared_ptr<Memory> memory_;  // outlives the tensors: declared before them

 public:
  Tensor starts, q, k, v, i_gate, f_gate, c, n, m, d_h, d_final_c, d_final_n;

 private:
  static constexpr Tensor MlstmCase::*kReals[] = {&MlstmCase::q,
                                                  &MlstmCase::k,
                                                  &MlstmCase::v,
                                                  &MlstmCase::i_gate,
                                                  &MlstmCase::f_gate,
                                                  &MlstmCase::c,
                                                  &MlstmCase::n,
                                                  &MlstmCase::m,
                                                  &MlstmCase::d_h,
                                                  &MlstmCase::d_final_c,
                                                  &MlstmCase::d_final_n};

  MlstmCase(const MlstmCase& other, DType dtype)
      : memory_(other.memory_), shape_(other.shape_), dtype_(dtype), tokens_(other.tokens_) {
    starts = empty(*memory_, DType::u8, {tokens_});
    std::copy_n(other.starts.as<std::uint8_t>(), tokens_, starts.as<std::uint8_t>());
  }

  Tensor normal(const Shape& shape, std::uint64_t seed) const {
    return normal_tensor(*memory_, DType::f64, shape, seed);
  }

  // Positive, summing to 1 over the last dimension, as softmax features are.
  Tensor features(const Shape& shape, std::uint64_t seed) const {
    Tensor x = normal(shape, seed);
    const std::int64_t size = shape[shape.rank() - 1];
    for (std::int64_t at = 0; at < x.size(); at += size) {
      softmax_row(x.as<double>() + at, x.as<double>() + at, size);
    }
    return x;
  }

  MlstmShape shape_;
  DType dtype_;
  std::int64_t tokens_ = 0;
};

inline void expect_close(const MlstmOutputs& got, const MlstmOutputs& want, double bound) {
  EXPECT_CLOSE(got.h, want.h, bound);
  EXPECT_CLOSE(got.c, want.c, bound);
  EXPECT_CLOSE(got.n, want.n, bound);
  EXPECT_CLOSE(got.m, want.m, bound);
}

// Errors relative to max|want| of a tensor, or to 1 % of the largest of all gradients where that is
// more: gates that decide nothing have gradients of pure rounding.
inline void expect_close(const MlstmGradients& got, const MlstmGradients& want, double bound) {
  const auto largest = [](const Tensor& x) {
    const std::vector<double> zeros(static_cast<std::size_t>(x.size()), 0.0);
    return x ? max_abs_error(x, zeros) : 0.0;
  };
  double all = 0;
  for (const Tensor* x : {&want.q, &want.k, &want.v, &want.i_gate, &want.f_gate, &want.c}) {
    all = std::max(all, largest(*x));
  }
  const auto compare = [&](const char* name, const Tensor& a, const Tensor& b) {
    SCOPED_TRACE(name);
    EXPECT_WITHIN(a, b, bound * std::max(largest(b), 0.01 * all));
  };
  compare("d_q", got.q, want.q);
  compare("d_k", got.k, want.k);
  compare("d_v", got.v, want.v);
  compare("d_i_gate", got.i_gate, want.i_gate);
  compare("d_f_gate", got.f_gate, want.f_gate);
  if (want.c) {
    compare("d_initial_c", got.c, want.c);
    compare("d_initial_n", got.n, want.n);
  }
}

}  // namespace bifocal::test
