// mLSTM problems on the device, and their results against the definition in double.
#pragma once

#include <string>
#include <vector>

#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "ops/mlstm.h"
#include "ops/mlstm_case.h"

namespace bifocal::test {

// Types of a problem: of q, k, v and of the gates; states are float32.
struct MlstmTypes {
  DType stored, gates;
  int shift;  // of every tensor, in elements
};

inline std::vector<MlstmTypes> mlstm_types() {
  return {{DType::f32, DType::f32, 0},
          {DType::f32, DType::f32, 1},
          {DType::bf16, DType::bf16, 0},
          {DType::bf16, DType::f32, 0},
          {DType::bf16, DType::bf16, 3}};
}

inline std::string describe(const MlstmCase& test, const MlstmTypes& types) {
  const MlstmShape& s = test.shape();
  return fmt::format(
      "{} shifted {}, gates {}; {} tokens, {} heads, {} states, {} value heads of {}",
      name_of(types.stored),
      types.shift,
      name_of(types.gates),
      test.tokens(),
      s.heads,
      s.states,
      s.v_heads,
      s.head_dim);
}

inline void round_to(DType type, const Tensor& x) {
  for (std::int64_t i = 0; i < x.size(); ++i) {
    x.as<double>()[i] = rounded(type, x.as<double>()[i]);
  }
}

// Rounds a float64 problem to what the device holds.
inline void round_inputs(MlstmCase& test, const MlstmTypes& types) {
  for (const Tensor* x : {&test.q, &test.k, &test.v, &test.d_h}) {
    round_to(types.stored, *x);
  }
  round_to(types.gates, test.i_gate);
  round_to(types.gates, test.f_gate);
  for (const Tensor* x : {&test.c, &test.n, &test.m, &test.d_final_c, &test.d_final_n}) {
    if (*x) {
      round_to(DType::f32, *x);
    }
  }
}

// Flags, numbers of sequences and the like, as they are, on the device.
inline DeviceTensor integers_on_device(const ConstTensorView& values) {
  DeviceTensor tensor(values.dtype, values.shape, 0);
  if (values.bytes() > 0) {
    BIFOCAL_CUDA(
        cudaMemcpy(tensor.view().data, values.data, values.bytes(), cudaMemcpyHostToDevice));
  }
  return tensor;
}

// The state's tensors on the device; poisoned where not given.
struct DeviceState {
  DeviceTensor c, n, m;

  DeviceState(const MlstmShape& s, int shift)
      : c(DType::f32, {s.states, s.head_dim, s.head_dim}, shift),
        n(DType::f32, {s.states, s.head_dim}, shift),
        m(DType::f32, {s.states}, shift) {}

  MlstmState view() const { return {.c = c.view(), .n = n.view(), .m = m.view()}; }
};

class DeviceMlstm {
 public:
  DeviceMlstm(const MlstmCase& test, const MlstmTypes& types)
      : types(types),
        shape(test.shape()),
        q(on_device(test.q, types.stored, types.shift)),
        k(on_device(test.k, types.stored, types.shift)),
        v(on_device(test.v, types.stored, types.shift)),
        i_gate(on_device(test.i_gate, types.gates, types.shift)),
        f_gate(on_device(test.f_gate, types.gates, types.shift)),
        d_h(on_device(test.d_h, types.stored, types.shift)),
        d_final_c(on_device(test.d_final_c, DType::f32, types.shift)),
        d_final_n(on_device(test.d_final_n, DType::f32, types.shift)),
        starts(integers_on_device(test.starts)),
        initial(test.shape(), types.shift),
        carried_(static_cast<bool>(test.c)) {
    if (carried_) {
      initial.c.upload(test.c);
      initial.n.upload(test.n);
      initial.m.upload(test.m);
    }
  }

  MlstmInputs shard(std::int64_t begin, std::int64_t end, const ConstMlstmState& state) const {
    return {.q = q.view().rows(begin, end),
            .k = k.view().rows(begin, end),
            .v = v.view().rows(begin, end),
            .i_gate = i_gate.view().rows(begin, end),
            .f_gate = f_gate.view().rows(begin, end),
            .starts = starts.view().rows(begin, end),
            .initial = state};
  }

  MlstmInputs inputs() const {
    return shard(
        0, k.view().shape[0], carried_ ? ConstMlstmState(initial.view()) : ConstMlstmState());
  }

  bool carried() const { return carried_; }

  MlstmTypes types;
  MlstmShape shape;
  DeviceTensor q, k, v, i_gate, f_gate, d_h, d_final_c, d_final_n, starts;
  DeviceState initial;

 private:
  bool carried_;
};

// Checked and queued, as run(Stream&, op) would.
template <class Op>
void call(CudaStream& stream, const Op& op) {
  op.check();
  run(stream, op);
}

// max |got - want| <= bound * max(max |want|, floor).
inline void expect_near(const char* name,
                        const std::vector<double>& got,
                        const ConstTensorView& want,
                        double bound,
                        double floor = 0.0) {
  const Difference d = difference(got, to_doubles(want));
  EXPECT_LE(d.largest, bound * std::max(d.scale, floor))
      << name << ' ' << to_string(want.shape) << ": " << d.describe();
}

}  // namespace bifocal::test
