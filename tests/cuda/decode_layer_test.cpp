// A layer's ops on one token of each sequence, and where sequences stand, on the device against the
// CPU in double. What a kernel rounds on its way is rounded alike in the reference.
#include "ops/decode_layer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/kernel_choice.h"
#include "ops/decode_linear.h"
#include "ops/decode_state.h"
#include "ops/recording.h"
#include "ops/rms_norm.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::kRoundoff;
using test::numbers_on_device;
using test::on_device;
using test::stored_normals;

const DType kTypes[] = {DType::f32, DType::bf16};

class DecodeLayer : public testing::Test {
 protected:
  Tensor normals(DType stored, const Shape& shape, std::uint64_t seed, double deviation = 1.0) {
    return stored_normals(memory_, stored, shape, seed, deviation);
  }

  Tensor empty(const Shape& shape, DType dtype = DType::f64) {
    return memory_.empty(Region::activations, dtype, shape);
  }

  void round_to(DType stored, const Tensor& x) {
    for (std::int64_t i = 0; i < x.size(); ++i) {
      x.as<double>()[i] = test::rounded(stored, x.as<double>()[i]);
    }
  }

  // float32 sums of `terms` products of about this size each.
  void expect_sums(const DeviceTensor& got,
                   const ConstTensorView& want,
                   DType stored,
                   std::int64_t terms,
                   double size) {
    const double bound = size * std::sqrt(static_cast<double>(terms)) * 4.0;
    const std::vector<double> magnitude(static_cast<std::size_t>(want.size()), bound);
    test::expect_close(got.download(cuda_), want, stored, 8.0, magnitude);
  }

  Memory memory_;
  CpuStream cpu_;
  CudaStream cuda_;
};

class DecodeProductKernels : public DecodeLayer, public testing::WithParamInterface<KernelChoice> {
 protected:
  void SetUp() override { set_kernel_choice(GetParam()); }

  void TearDown() override { set_kernel_choice(KernelChoice::automatic); }
};

INSTANTIATE_TEST_SUITE_P(Portable, DecodeProductKernels, testing::Values(KernelChoice::portable));
INSTANTIATE_TEST_SUITE_P(Hopper, DecodeProductKernels, testing::Values(KernelChoice::automatic));

// Three matrices of one input, of odd and even heights, with bias and with something to add; rows
// below, at and above the four that go together; inputs short, long enough for a block to share a
// row, and of a width that 16 bytes do not divide.
TEST_P(DecodeProductKernels, ProductsWithNormBiasAndAddition) {
  for (const DType stored : kTypes) {
    for (const std::int64_t rows : {1, 4, 6}) {
      for (const std::int64_t in : {96, 2560, 4160, 35}) {
        SCOPED_TRACE(testing::Message() << name_of(stored) << " rows " << rows << " in " << in);
        const Tensor x = normals(stored, {rows, in}, 1);
        const Tensor norm = normals(stored, {in}, 2);
        const Tensor normed = empty({rows, in});
        run(cpu_, RmsNormForward{.y = normed, .x = x, .weight = norm, .eps = 1e-6});
        round_to(stored, normed);
        const DeviceTensor device_x = on_device(x, stored, 0);
        const DeviceTensor device_norm = on_device(norm, stored, 0);
        std::vector<Tensor> wants;
        std::vector<DeviceTensor> device;
        std::vector<std::size_t> outputs;
        std::vector<DType> types;
        std::vector<DecodeProduct> products;
        device.reserve(12);
        std::uint64_t seed = 3;
        for (const std::int64_t out : {70, 1, 33}) {
          const Tensor weight = normals(stored, {out, in}, seed++, 0.1);
          const Tensor bias = normals(stored, {out}, seed++);
          const Tensor add = normals(stored, {rows, out}, seed++);
          Tensor want = empty({rows, out});
          run(cpu_, DecodeLinear{.y = want, .x = normed, .weight = weight, .bias = bias});
          for (std::int64_t i = 0; i < want.size(); ++i) {
            want.as<double>()[i] += out == 1 ? 0.0 : add.as<double>()[i];
          }
          const DType type = out == 33 ? DType::f32 : stored;
          device.push_back(on_device(weight, stored, 0));
          device.push_back(on_device(bias, stored, 0));
          device.push_back(on_device(add, type, 0));
          outputs.push_back(device.size());
          device.emplace_back(type, want.shape(), 0);
          const std::size_t at = outputs.back();
          products.push_back({.y = device[at].view(),
                              .weight = device[at - 3].view(),
                              .bias = device[at - 2].view(),
                              .add = out == 1 ? ConstTensorView{} : device[at - 1].view()});
          types.push_back(type);
          wants.push_back(std::move(want));
        }
        const DecodeProducts op{
            .products = products, .x = device_x.view(), .norm = device_norm.view(), .eps = 1e-6};
        op.check();
        run(cuda_, op);
        for (std::size_t i = 0; i < wants.size(); ++i) {
          // A norm that rounds the other way counts like a step of the input.
          const double step = stored == DType::bf16 ? 4e-3 / kRoundoff / 8.0 * 0.02 : 1.0;
          expect_sums(device[outputs[i]], wants[i], types[i], in, 0.1 * std::max(1.0, step));
        }
        // Rows do not know of each other.
        const std::vector<double> together = device[outputs[0]].download(cuda_);
        for (std::int64_t row = 0; row < rows; ++row) {
          std::vector<DecodeProduct> alone = products;
          for (DecodeProduct& product : alone) {
            product.y = product.y.rows(row, row + 1);
            product.add = product.add ? product.add.rows(row, row + 1) : product.add;
          }
          run(cuda_,
              DecodeProducts{.products = alone,
                             .x = device_x.view().rows(row, row + 1),
                             .norm = device_norm.view(),
                             .eps = 1e-6});
        }
        EXPECT_EQ(device[outputs[0]].download(cuda_), together);
      }
    }
  }
}

TEST_P(DecodeProductKernels, GatedProduct) {
  for (const DType stored : kTypes) {
    for (const std::int64_t in : {64, 2560}) {
      SCOPED_TRACE(testing::Message() << name_of(stored) << " in " << in);
      constexpr std::int64_t kRows = 3;
      constexpr std::int64_t kOut = 45;
      const Tensor x = normals(stored, {kRows, in}, 1);
      const Tensor norm = normals(stored, {in}, 2);
      const Tensor gate = normals(stored, {kOut, in}, 3, 0.02);
      const Tensor up = normals(stored, {kOut, in}, 4, 0.02);
      const Tensor normed = empty({kRows, in});
      run(cpu_, RmsNormForward{.y = normed, .x = x, .weight = norm, .eps = 1e-6});
      round_to(stored, normed);
      const Tensor g = empty({kRows, kOut});
      const Tensor want = empty({kRows, kOut});
      run(cpu_, DecodeLinear{.y = g, .x = normed, .weight = gate});
      run(cpu_, DecodeLinear{.y = want, .x = normed, .weight = up});
      for (std::int64_t i = 0; i < want.size(); ++i) {
        want.as<double>()[i] *= g.as<double>()[i] / (1.0 + std::exp(-g.as<double>()[i]));
      }
      const DeviceTensor device_x = on_device(x, stored, 0);
      const DeviceTensor device_norm = on_device(norm, stored, 0);
      const DeviceTensor device_gate = on_device(gate, stored, 0);
      const DeviceTensor device_up = on_device(up, stored, 0);
      const DeviceTensor y(stored, {kRows, kOut}, 0);
      const DecodeGatedProduct op{.y = y.view(),
                                  .x = device_x.view(),
                                  .norm = device_norm.view(),
                                  .gate = device_gate.view(),
                                  .up = device_up.view()};
      op.check();
      run(cuda_, op);
      expect_sums(y, want, stored, in, stored == DType::bf16 ? 0.2 : 0.02);
    }
  }
}

struct HeadsCase {
  std::int64_t rows, heads, kv_heads, states, dim;
  bool norm, features;
};

TEST_F(DecodeLayer, HeadsAreNormedRotatedCachedAndMapped) {
  for (const DType stored : kTypes) {
    for (const HeadsCase& c : {HeadsCase{1, 8, 2, 2, 256, true, true},
                               HeadsCase{3, 8, 2, 2, 128, true, true},
                               HeadsCase{2, 4, 2, 4, 64, false, true},
                               HeadsCase{2, 4, 4, 4, 16, true, true},
                               HeadsCase{5, 6, 1, 1, 12, false, true},
                               HeadsCase{2, 4, 2, 2, 96, true, false}}) {
      SCOPED_TRACE(testing::Message() << name_of(stored) << " dim " << c.dim);
      const Shape q_shape{c.rows, c.heads, c.dim};
      const Shape k_shape{c.rows, c.kv_heads, c.dim};
      const Tensor q = normals(stored, q_shape, 1);
      const Tensor k = normals(stored, k_shape, 2);
      const Tensor v = normals(stored, k_shape, 3);
      const Tensor q_norm = normals(stored, {c.dim}, 4);
      const Tensor k_norm = normals(stored, {c.dim}, 5);
      const Tensor cos = normals(DType::f32, {c.rows, c.dim / 2}, 6);
      const Tensor sin = normals(DType::f32, {c.rows, c.dim / 2}, 7);
      const Tensor wq = normals(stored, {c.heads, c.dim, c.dim}, 8, 0.2);
      const Tensor wk = normals(stored, {c.states, c.dim, c.dim}, 9, 0.2);
      // Caches of different sizes; the reference has the same.
      std::vector<std::int32_t> places;
      std::vector<Tensor> host_k, host_v;
      std::vector<TensorView> host_k_views, host_v_views;
      std::vector<DeviceTensor> device_k, device_v;
      std::vector<TensorView> k_views, v_views;
      for (std::int64_t row = 0; row < c.rows; ++row) {
        const Shape shape{3 + row, c.kv_heads * c.dim};
        places.push_back(static_cast<std::int32_t>(2 + row / 2));
        host_k.push_back(normals(stored, shape, 20 + static_cast<std::uint64_t>(row)));
        host_v.push_back(normals(stored, shape, 40 + static_cast<std::uint64_t>(row)));
        device_k.push_back(on_device(host_k.back(), stored, 0));
        device_v.push_back(on_device(host_v.back(), stored, 0));
      }
      for (std::size_t row = 0; row < places.size(); ++row) {
        host_k_views.push_back(host_k[row]);
        host_v_views.push_back(host_v[row]);
        k_views.push_back(device_k[row].view());
        v_views.push_back(device_v[row].view());
      }
      const Tensor want_q = empty(q_shape);
      const Tensor want_fq = empty(q_shape);
      const Tensor want_fk = empty({c.rows, c.states, c.dim});
      DecodeHeads want{.q = want_q,
                       .k_cache = host_k_views,
                       .v_cache = host_v_views,
                       .places = {places.data(), DType::i32, {c.rows}},
                       .projected_q = q,
                       .projected_k = k,
                       .v = v,
                       .cos = cos,
                       .sin = sin};
      if (c.norm) {
        want.q_norm = q_norm;
        want.k_norm = k_norm;
      }
      run(cpu_, want);
      // Features of what was rounded.
      const Tensor rounded_q = empty(q_shape);
      const Tensor rounded_k = empty(k_shape);
      std::copy_n(want_q.as<double>(), want_q.size(), rounded_q.as<double>());
      for (std::int64_t row = 0; row < c.rows; ++row) {
        const auto at = static_cast<std::size_t>(row);
        std::copy_n(host_k[at].rows(places[at], places[at] + 1).as<double>(),
                    c.kv_heads * c.dim,
                    rounded_k.rows(row, row + 1).as<double>());
      }
      round_to(stored, rounded_q);
      round_to(stored, rounded_k);
      run(cpu_, DecodeFeatureMap{.y = want_fq, .x = rounded_q, .weight = wq});
      run(cpu_, DecodeFeatureMap{.y = want_fk, .x = rounded_k, .weight = wk});

      const DeviceTensor device_q = on_device(q, stored, 0);
      const DeviceTensor device_pk = on_device(k, stored, 0);
      const DeviceTensor device_pv = on_device(v, stored, 0);
      const DeviceTensor device_qn = on_device(q_norm, stored, 0);
      const DeviceTensor device_kn = on_device(k_norm, stored, 0);
      const DeviceTensor device_cos = on_device(cos, DType::f32, 0);
      const DeviceTensor device_sin = on_device(sin, DType::f32, 0);
      const DeviceTensor device_wq = on_device(wq, stored, 0);
      const DeviceTensor device_wk = on_device(wk, stored, 0);
      const DeviceTensor device_places = numbers_on_device(places);
      const DeviceTensor out_q(stored, q_shape, 0);
      const DeviceTensor out_fq(stored, q_shape, 0);
      const DeviceTensor out_fk(stored, want_fk.shape(), 0);
      DecodeHeads op{.q = out_q.view(),
                     .k_cache = k_views,
                     .v_cache = v_views,
                     .places = device_places.view(),
                     .projected_q = device_q.view(),
                     .projected_k = device_pk.view(),
                     .v = device_pv.view(),
                     .cos = device_cos.view(),
                     .sin = device_sin.view()};
      if (c.norm) {
        op.q_norm = device_qn.view();
        op.k_norm = device_kn.view();
      }
      if (c.features) {
        op.feature_q = out_fq.view();
        op.feature_k = out_fk.view();
        op.feature_q_weight = device_wq.view();
        op.feature_k_weight = device_wk.view();
      }
      op.check();
      run(cuda_, op);
      expect_sums(out_q, want_q, stored, 4, 4.0);
      for (std::size_t row = 0; row < places.size(); ++row) {
        expect_sums(device_k[row], host_k[row], stored, 4, 4.0);
        expect_sums(device_v[row], host_v[row], stored, 1, 0.0);
      }
      if (c.features) {
        // Rotated heads that round the other way move a logit by 2^-9 of a term.
        const double size = stored == DType::bf16 ? 2e-3 / kRoundoff / 8.0 * 0.1 : 4.0;
        expect_sums(out_fq, want_fq, stored, c.dim, size * 0.05);
        expect_sums(out_fk, want_fk, stored, c.dim, size * 0.05);
      }
    }
  }
}

struct MixerCase {
  std::vector<std::int32_t> lengths;
  std::int64_t heads, kv_heads, states, dim;
  bool near, far, gate, sink;
};

// Lengths around splits of 16 slots and past 64 of them; every combination of branches; several
// steps, so that states go on from states.
TEST_F(DecodeLayer, MixerIsAttentionAndTheMlstmOverSeveralSteps) {
  for (const DType stored : kTypes) {
    for (const MixerCase& c : {MixerCase{{320}, 16, 4, 4, 256, true, true, true, true},
                               MixerCase{{1, 16, 17, 448}, 32, 8, 8, 128, true, true, true, true},
                               MixerCase{{15, 1025, 5000}, 8, 2, 2, 64, true, false, false, false},
                               MixerCase{{9, 33}, 8, 1, 1, 24, true, true, false, true},
                               MixerCase{{40, 41}, 4, 2, 4, 16, true, true, true, false},
                               MixerCase{{7, 8}, 12, 1, 2, 96, false, true, false, false}}) {
      SCOPED_TRACE(testing::Message()
                   << name_of(stored) << " dim " << c.dim << " heads " << c.heads);
      const auto rows = static_cast<std::int64_t>(c.lengths.size());
      const std::int64_t held = rows + 2;
      const Shape q_shape{rows, c.heads, c.dim};
      std::vector<Tensor> host_k, host_v;
      std::vector<DeviceTensor> device_k, device_v;
      std::vector<ConstTensorView> host_keys, host_values, keys, values;
      std::vector<std::int32_t> sequences;
      for (std::int64_t row = 0; row < rows; ++row) {
        const Shape shape{c.lengths[static_cast<std::size_t>(row)] + row % 2, c.kv_heads * c.dim};
        host_k.push_back(normals(stored, shape, 20 + static_cast<std::uint64_t>(row)));
        host_v.push_back(normals(stored, shape, 40 + static_cast<std::uint64_t>(row)));
        device_k.push_back(on_device(host_k.back(), stored, 0));
        device_v.push_back(on_device(host_v.back(), stored, 0));
        sequences.push_back(static_cast<std::int32_t>(held - 1 - row));
      }
      for (std::size_t row = 0; row < host_k.size(); ++row) {
        host_keys.push_back(host_k[row]);
        host_values.push_back(host_v[row]);
        keys.push_back(device_k[row].view());
        values.push_back(device_v[row].view());
      }
      const Shape state_shape{held, c.states, c.dim, c.dim};
      const Tensor c_state = normals(DType::f32, state_shape, 60, 0.1);
      const Tensor n_state = empty({held, c.states, c.dim});
      const Tensor m_state = normals(DType::f32, {held, c.states}, 62);
      for (std::int64_t i = 0; i < n_state.size(); ++i) {
        n_state.as<double>()[i] =
            test::rounded(DType::f32, 0.5 + 0.001 * static_cast<double>(i % 7));
      }
      const DeviceTensor device_c = on_device(c_state, DType::f32, 0);
      const DeviceTensor device_n = on_device(n_state, DType::f32, 0);
      const DeviceTensor device_m = on_device(m_state, DType::f32, 0);
      const DeviceTensor device_lengths = numbers_on_device(c.lengths);
      const DeviceTensor device_sequences = numbers_on_device(sequences);
      const Tensor sink = normals(stored, {c.heads}, 63, 3.0);
      const DeviceTensor device_sink = on_device(sink, stored, 0);
      const std::int64_t numbers = decode_mixer_workspace(rows, c.heads, c.dim);
      const DeviceTensor workspace(DType::f32, {numbers}, 0);
      for (std::uint64_t step = 0; step < 3; ++step) {
        const std::uint64_t seed = 100 + 10 * step;
        const Tensor q = normals(stored, q_shape, seed);
        const Tensor v = normals(stored, {rows, c.kv_heads, c.dim}, seed + 1);
        const Tensor i_gate = normals(DType::f32, {rows, c.states}, seed + 2, 2.0);
        const Tensor f_gate = normals(DType::f32, {rows, c.states}, seed + 3, 4.0);
        const Tensor gate = normals(DType::f32, {rows, c.heads}, seed + 4, 2.0);
        Tensor feature_q = normals(stored, q_shape, seed + 5);
        Tensor feature_k = normals(stored, {rows, c.states, c.dim}, seed + 6);
        for (Tensor* features : {&feature_q, &feature_k}) {
          for (std::int64_t i = 0; i < features->size(); ++i) {
            features->as<double>()[i] = std::abs(features->as<double>()[i]);
          }
        }
        const DeviceTensor device_q = on_device(q, stored, 0);
        const DeviceTensor device_pv = on_device(v, stored, 0);
        const DeviceTensor device_i = on_device(i_gate, DType::f32, 0);
        const DeviceTensor device_f = on_device(f_gate, DType::f32, 0);
        const DeviceTensor device_gate = on_device(gate, DType::f32, 0);
        const DeviceTensor device_fq = on_device(feature_q, stored, 0);
        const DeviceTensor device_fk = on_device(feature_k, stored, 0);
        const Tensor want = empty(q_shape);
        const DeviceTensor y(stored, q_shape, 0);
        DecodeMixer on_host{.y = want};
        DecodeMixer op{.y = y.view(), .workspace = workspace.view()};
        if (c.near) {
          on_host.near = {.q = q,
                          .k = host_keys,
                          .v = host_values,
                          .lengths = {c.lengths.data(), DType::i32, {rows}}};
          op.near = {
              .q = device_q.view(), .k = keys, .v = values, .lengths = device_lengths.view()};
          if (c.sink) {
            on_host.near.sink = sink;
            op.near.sink = device_sink.view();
          }
        }
        if (c.far) {
          on_host.far = {.c = c_state,
                         .n = n_state,
                         .m = m_state,
                         .q = feature_q,
                         .k = feature_k,
                         .v = v,
                         .i_gate = i_gate,
                         .f_gate = f_gate,
                         .sequences = {sequences.data(), DType::i32, {rows}}};
          op.far = {.c = device_c.view(),
                    .n = device_n.view(),
                    .m = device_m.view(),
                    .q = device_fq.view(),
                    .k = device_fk.view(),
                    .v = device_pv.view(),
                    .i_gate = device_i.view(),
                    .f_gate = device_f.view(),
                    .sequences = device_sequences.view()};
        }
        if (c.gate) {
          on_host.gate = gate;
          op.gate = device_gate.view();
        }
        op.check();
        run(cpu_, on_host);
        run(cuda_, op);
        SCOPED_TRACE(testing::Message() << "step " << step);
        expect_sums(y, want, stored, c.dim, 1.0);
        if (c.far) {
          // m is rounded at every step, on the device and not on the host; C and n stand at its
          // scale.
          expect_sums(device_c, c_state, DType::f32, c.dim, 2.0);
          expect_sums(device_n, n_state, DType::f32, c.dim, 2.0);
          expect_sums(device_m, m_state, DType::f32, 4, 8.0);
        }
      }
    }
  }
}

// Replays advance the same tensors that the ops would, and give their bits.
TEST_F(DecodeLayer, StepsAndCachePlacesRecordedAreThoseOfTheHost) {
  const std::vector<std::int32_t> sequences{3, 0, 2};
  const std::vector<std::int32_t> start{0, 7, 150, 30};
  const std::vector<std::int64_t> streams{5, 6, 7, 8};
  const DeviceTensor device_sequences = numbers_on_device(sequences);
  const DeviceTensor token = numbers_on_device(std::vector<std::int32_t>{11, 12, 13, 14});
  const DeviceTensor position = numbers_on_device(start);
  const DeviceTensor stream = numbers_on_device(streams);
  const DeviceTensor drawn = numbers_on_device(std::vector<std::int64_t>{0, 1, 2, 3});
  const DeviceTensor ids(DType::i32, {3}, 0);
  const DeviceTensor positions(DType::i32, {3}, 0);
  const DeviceTensor row_streams(DType::i64, {3}, 0);
  const DeviceTensor indices(DType::i64, {3}, 0);
  const DeviceTensor places(DType::i32, {3}, 0);
  const DeviceTensor lengths(DType::i32, {3}, 0);
  const auto queue = [&] {
    run(cuda_,
        StepBegin{.ids = ids.view(),
                  .positions = positions.view(),
                  .streams = row_streams.view(),
                  .indices = indices.view(),
                  .state = {token.view(), position.view(), stream.view(), drawn.view()},
                  .sequences = device_sequences.view()});
    run(cuda_,
        CachePlaces{.places = places.view(),
                    .lengths = lengths.view(),
                    .positions = positions.view(),
                    .window = 8,
                    .pinned = 4});
    run(cuda_,
        StepEnd{
            .token = token.view(), .ids = positions.view(), .sequences = device_sequences.view()});
  };
  queue();
  const std::unique_ptr<Recording> recording = record(cuda_, queue);
  constexpr std::int64_t kReplays = 20;
  for (std::int64_t i = 0; i < kReplays; ++i) {
    recording->replay();
  }
  const auto numbers = [&](const DeviceTensor& tensor) { return tensor.download(cuda_); };
  for (std::size_t row = 0; row < sequences.size(); ++row) {
    const auto at = static_cast<std::size_t>(sequences[row]);
    const std::int64_t last = start[at] + kReplays;
    EXPECT_EQ(numbers(positions)[row], static_cast<double>(last));
    EXPECT_EQ(numbers(ids)[row], static_cast<double>(last - 1));  // the token of the step before
    EXPECT_EQ(numbers(indices)[row], static_cast<double>(static_cast<std::int64_t>(at) + kReplays));
    EXPECT_EQ(numbers(row_streams)[row], static_cast<double>(streams[at]));
    EXPECT_EQ(numbers(places)[row], static_cast<double>(cache_place(last, 8, 4)));
    EXPECT_EQ(numbers(lengths)[row], 12.0);
  }
  EXPECT_EQ(numbers(position)[1], 7.0);  // no step of this sequence
}

}  // namespace
}  // namespace bifocal
