// A problem of sliding attention on the device.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "ops/attention_problem.h"
#include "ops/sliding_attention.h"

namespace bifocal::test {

// The elements of x become numbers that `stored` holds exactly.
inline void round_to(DType stored, const Tensor& x) {
  for (std::int64_t i = 0; i < x.size(); ++i) {
    x.as<double>()[i] = test::rounded(stored, x.as<double>()[i]);
  }
}

inline void round_inputs(DType stored, const Problem& p) {
  for (const Tensor* x : {&p.q, &p.k, &p.v, &p.sink, &p.pinned_k, &p.pinned_v, &p.d_out}) {
    round_to(stored, *x);
  }
}

// int32 numbers on the device.
class DeviceInts {
 public:
  explicit DeviceInts(const Tensor& values) : tensor_(DType::f32, values.shape(), 0) {
    view_ = tensor_.view();
    view_.dtype = DType::i32;
    BIFOCAL_CUDA(cudaMemcpy(view_.data, values.view().data, view_.bytes(), cudaMemcpyHostToDevice));
    BIFOCAL_CUDA(cudaDeviceSynchronize());
  }

  const TensorView& view() const { return view_; }

 private:
  DeviceTensor tensor_;
  TensorView view_;
};

// The problem's tensors on the device; outputs start as NaN and d_sink as 0.5.
struct DeviceProblem {
  const Problem& host;
  DeviceTensor q, k, v, sink, pinned_k, pinned_v, d_out;
  DeviceInts key_begin, pinned_begin, pinned_end;
  DeviceTensor out, lse, d_q, d_k, d_v, d_sink, d_pinned_k, d_pinned_v;

  DeviceProblem(const Problem& p, DType stored, int shift)
      : host(p),
        q(on_device(p.q, stored, shift)),
        k(on_device(p.k, stored, shift)),
        v(on_device(p.v, stored, shift)),
        sink(on_device(p.sink, stored, shift)),
        pinned_k(on_device(p.pinned_k, stored, shift)),
        pinned_v(on_device(p.pinned_v, stored, shift)),
        d_out(on_device(p.d_out, stored, shift)),
        key_begin(p.key_begin),
        pinned_begin(p.pinned_begin),
        pinned_end(p.pinned_end),
        out(stored, p.q.shape(), shift),
        lse(DType::f32, p.lse.shape(), shift),
        d_q(stored, p.q.shape(), shift),
        d_k(stored, p.k.shape(), shift),
        d_v(stored, p.k.shape(), shift),
        d_sink(DType::f32, p.sink.shape(), shift),
        d_pinned_k(stored, p.pinned_k.shape(), shift),
        d_pinned_v(stored, p.pinned_k.shape(), shift) {
    reset();
  }

  void reset() {
    constexpr int kNanByte = 0xff;  // all bits set are NaN in either type
    for (const DeviceTensor* x : {&out, &lse, &d_q, &d_k, &d_v, &d_pinned_k, &d_pinned_v}) {
      BIFOCAL_CUDA(cudaMemset(x->view().data, kNanByte, x->view().bytes()));
    }
    fill(d_sink, 0.5);
  }

  void fill(DeviceTensor& x, double value) const {
    const Tensor host_values = host.memory.empty(Region::activations, DType::f64, x.view().shape);
    test::fill(host_values, [&](std::int64_t) { return value; });
    x.upload(host_values);
  }

  AttentionInputs inputs() const {
    AttentionInputs in{q.view(), k.view(), v.view(), key_begin.view(), {}, {}, {}, {}, {}};
    if (host.has_sink) {
      in.sink = sink.view();
    }
    if (host.has_pinned) {
      in.pinned_k = pinned_k.view();
      in.pinned_v = pinned_v.view();
      in.pinned_begin = pinned_begin.view();
      in.pinned_end = pinned_end.view();
    }
    return in;
  }

  SlidingAttentionForward forward() const { return {out.view(), lse.view(), inputs()}; }

  SlidingAttentionBackward backward() const {
    SlidingAttentionBackward op{.d_q = d_q.view(),
                                .d_k = d_k.view(),
                                .d_v = d_v.view(),
                                .d_sink = {},
                                .d_pinned_k = {},
                                .d_pinned_v = {},
                                .d_out = d_out.view(),
                                .out = out.view(),
                                .lse = lse.view(),
                                .inputs = inputs()};
    if (host.has_sink) {
      op.d_sink = d_sink.view();
    }
    if (host.has_pinned) {
      op.d_pinned_k = d_pinned_k.view();
      op.d_pinned_v = d_pinned_v.view();
    }
    return op;
  }

  void run_both(CudaStream& stream) const {
    forward().check();
    run(stream, forward());
    backward().check();
    run(stream, backward());
  }

  struct Pair {
    const char* name;
    const DeviceTensor* got;
    const Tensor* want;
  };

  std::vector<Pair> outputs() const {
    std::vector<Pair> all{{"out", &out, &host.out},
                          {"lse", &lse, &host.lse},
                          {"d_q", &d_q, &host.d_q},
                          {"d_k", &d_k, &host.d_k},
                          {"d_v", &d_v, &host.d_v}};
    if (host.has_sink) {
      all.push_back({"d_sink", &d_sink, &host.d_sink});
    }
    if (host.has_pinned) {
      all.push_back({"d_pinned_k", &d_pinned_k, &host.d_pinned_k});
      all.push_back({"d_pinned_v", &d_pinned_v, &host.d_pinned_v});
    }
    return all;
  }

  std::vector<std::vector<double>> downloads(CudaStream& stream) const {
    std::vector<std::vector<double>> all;
    for (const Pair& pair : outputs()) {
      all.push_back(pair.got->download(stream));
    }
    return all;
  }
};

}  // namespace bifocal::test
