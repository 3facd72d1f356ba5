// Times of a token's kernels in a recording, each kind by itself in all layers and all together, at
// the shapes of Qwen3.5-4B and Qwen3-4B, with the portable kernels and with those of the device.
#include <functional>
#include <string>
#include <vector>

#include "cuda/speed.h"
#include "kernels/kernel_choice.h"
#include "ops/decode_layer.h"
#include "ops/recording.h"
#include "ops/sample.h"

namespace bifocal {
namespace {

using test::DeviceTensor;
using test::numbers_on_device;
using test::speed_tensor;

constexpr auto kBf16 = DType::bf16;
constexpr auto kF32 = DType::f32;
constexpr std::int64_t kSlots = 320;

struct Shapes {
  const char* name;
  std::int64_t layers, heads, kv_heads, dim, intermediate, vocabulary;
  std::int64_t hidden = 2560;
};

// Weights of all layers one after another, so that no cache holds them.
class Token {
 public:
  explicit Token(const Shapes& shapes) : s(shapes) {}

  void projections(CudaStream& stream, std::int64_t layer) const {
    const auto part = [&](const DeviceTensor& y, const DeviceTensor& weights) {
      const std::int64_t out = weights.view().shape[1];
      return DecodeProduct{.y = y.view().reshape({1, out}), .weight = of(weights, layer)};
    };
    const DecodeProduct parts[] = {part(projected_q, q_weight),
                                   part(projected_k, k_weight),
                                   part(v, v_weight),
                                   part(i_gate, i_weight),
                                   part(f_gate, f_weight),
                                   part(o_gate, o_gate_weight)};
    run(stream, DecodeProducts{.products = parts, .x = x.view(), .norm = norm.view()});
  }

  void heads(CudaStream& stream, std::int64_t layer) const {
    const TensorView keys[] = {of(k_cache, layer)};
    const TensorView values[] = {of(v_cache, layer)};
    run(stream,
        DecodeHeads{.q = q.view(),
                    .k_cache = keys,
                    .v_cache = values,
                    .places = places.view(),
                    .feature_q = feature_q.view(),
                    .feature_k = feature_k.view(),
                    .projected_q = projected_q.view(),
                    .projected_k = projected_k.view(),
                    .v = v.view(),
                    .q_norm = head_norm.view(),
                    .k_norm = head_norm.view(),
                    .cos = angles.view(),
                    .sin = angles.view(),
                    .feature_q_weight = of(map_q, layer),
                    .feature_k_weight = of(map_k, layer)});
  }

  void mixer(CudaStream& stream, std::int64_t layer) const {
    const ConstTensorView keys[] = {of(k_cache, layer)};
    const ConstTensorView values[] = {of(v_cache, layer)};
    run(stream,
        DecodeMixer{.y = mixed.view(),
                    .workspace = workspace.view(),
                    .near = {.q = q.view(),
                             .k = keys,
                             .v = values,
                             .lengths = lengths.view(),
                             .newest = places.view()},
                    .far = {.c = of(c, layer).reshape({1, s.kv_heads, s.dim, s.dim}),
                            .n = of(n, layer).reshape({1, s.kv_heads, s.dim}),
                            .m = of(m, layer).reshape({1, s.kv_heads}),
                            .q = feature_q.view(),
                            .k = feature_k.view(),
                            .v = v.view(),
                            .i_gate = i_gate.view(),
                            .f_gate = f_gate.view(),
                            .sequences = places.view()},
                    .gate = o_gate.view()});
  }

  void output(CudaStream& stream, std::int64_t layer) const {
    const DecodeProduct out{.y = x.view(), .weight = of(out_weight, layer), .add = x.view()};
    run(stream,
        DecodeProducts{.products = {&out, 1}, .x = mixed.view().reshape({1, s.heads * s.dim})});
  }

  void gated(CudaStream& stream, std::int64_t layer) const {
    run(stream,
        DecodeGatedProduct{.y = act.view(),
                           .x = x.view(),
                           .norm = norm.view(),
                           .gate = of(gate_weight, layer),
                           .up = of(up_weight, layer)});
  }

  void down(CudaStream& stream, std::int64_t layer) const {
    const DecodeProduct out{.y = x.view(), .weight = of(down_weight, layer), .add = x.view()};
    run(stream, DecodeProducts{.products = {&out, 1}, .x = act.view()});
  }

  void head(CudaStream& stream) const {
    const DecodeProduct product{.y = logits.view(), .weight = head_weight.view()};
    run(stream, DecodeProducts{.products = {&product, 1}, .x = x.view(), .norm = norm.view()});
  }

  void draw(CudaStream& stream) const {
    run(stream, Sample{.ids = id.view(), .logits = logits.view()});
  }

  static double bytes(std::initializer_list<const DeviceTensor*> tensors) {
    double sum = 0.0;
    for (const DeviceTensor* tensor : tensors) {
      sum += static_cast<double>(tensor->view().bytes());
    }
    return sum;
  }

  const Shapes s;

 private:
  DeviceTensor weights(std::int64_t out, std::int64_t in) const {
    return speed_tensor(kBf16, {s.layers, out, in}, 1, 0.02);
  }

  static TensorView of(const DeviceTensor& all, std::int64_t layer) {
    const Shape& shape = all.view().shape;
    const TensorView one = all.view().rows(layer, layer + 1);
    return shape.rank() == 4   ? one.reshape({shape[1], shape[2], shape[3]})
           : shape.rank() == 3 ? one.reshape({shape[1], shape[2]})
                               : one;
  }

 public:
  const std::int64_t width = s.heads * s.dim, kv_width = s.kv_heads * s.dim;
  const DeviceTensor q_weight = weights(width, s.hidden), k_weight = weights(kv_width, s.hidden),
                     v_weight = weights(kv_width, s.hidden),
                     i_weight = weights(s.kv_heads, s.hidden),
                     f_weight = weights(s.kv_heads, s.hidden),
                     o_gate_weight = weights(s.heads, s.hidden),
                     out_weight = weights(s.hidden, width),
                     gate_weight = weights(s.intermediate, s.hidden),
                     up_weight = weights(s.intermediate, s.hidden),
                     down_weight = weights(s.hidden, s.intermediate);
  const DeviceTensor map_q = speed_tensor(kBf16, {s.layers, s.heads, s.dim, s.dim}, 2, 0.1);
  const DeviceTensor map_k = speed_tensor(kBf16, {s.layers, s.kv_heads, s.dim, s.dim}, 3, 0.1);
  const DeviceTensor k_cache = weights(kSlots, kv_width), v_cache = weights(kSlots, kv_width);
  const DeviceTensor c = speed_tensor(kF32, {s.layers, s.kv_heads, s.dim, s.dim}, 4);
  const DeviceTensor n = speed_tensor(kF32, {s.layers, s.kv_heads, s.dim}, 5, 1.0, 0.0, true);
  const DeviceTensor m = speed_tensor(kF32, {s.layers, s.kv_heads}, 6);
  const DeviceTensor head_weight = speed_tensor(kBf16, {s.vocabulary, s.hidden}, 7, 0.02);
  const DeviceTensor norm = speed_tensor(kBf16, {s.hidden}, 8),
                     x = speed_tensor(kBf16, {1, s.hidden}, 9),
                     head_norm = speed_tensor(kBf16, {s.dim}, 10),
                     angles = speed_tensor(kF32, {1, s.dim / 2}, 11);
  const DeviceTensor projected_q = speed_tensor(kBf16, {1, s.heads, s.dim}, 12),
                     projected_k = speed_tensor(kBf16, {1, s.kv_heads, s.dim}, 13),
                     v = speed_tensor(kBf16, {1, s.kv_heads, s.dim}, 14),
                     q = speed_tensor(kBf16, {1, s.heads, s.dim}, 15),
                     mixed = speed_tensor(kBf16, {1, s.heads, s.dim}, 16),
                     feature_q = speed_tensor(kBf16, {1, s.heads, s.dim}, 17, 1.0, 0.0, true),
                     feature_k = speed_tensor(kBf16, {1, s.kv_heads, s.dim}, 18, 1.0, 0.0, true),
                     act = speed_tensor(kBf16, {1, s.intermediate}, 19);
  const DeviceTensor i_gate = speed_tensor(kF32, {1, s.kv_heads}, 20),
                     f_gate = speed_tensor(kF32, {1, s.kv_heads}, 21, 1.0, 3.0),
                     o_gate = speed_tensor(kF32, {1, s.heads}, 22);
  const DeviceTensor logits = speed_tensor(kF32, {1, s.vocabulary}, 23);
  const DeviceTensor workspace =
      speed_tensor(kF32, {decode_mixer_workspace(1, s.heads, s.dim)}, 24);
  const DeviceTensor places = numbers_on_device(std::vector<std::int32_t>{0});
  const DeviceTensor lengths = numbers_on_device(std::vector<std::int32_t>{kSlots});
  const DeviceTensor id = numbers_on_device(std::vector<std::int32_t>{0});
};

class CudaDecodeSpeed : public test::CudaSpeed {
 protected:
  // `queue` once as it is, then recorded. Prints microseconds of each of `kernels` besides.
  void recorded(const std::string& name,
                double bytes,
                std::int64_t kernels,
                const std::function<void()>& queue) {
    queue();
    const std::unique_ptr<Recording> recording = record(stream_, queue);
    recording->replay();
    const double ms = test::median_ms(stream_, [&] { recording->replay(); });
    std::puts(fmt::format("speed  {:<52} {:>9.4f} ms {:>8.2f} us each {:>7.3f} TB/s",
                          name,
                          ms,
                          1e3 * ms / static_cast<double>(kernels),
                          bytes / ms * 1e-9)
                  .c_str());
    std::fflush(stdout);
    EXPECT_GT(ms, 0.0);
  }

  void time_token(const Token& token, const std::string& name) {
    const std::int64_t layers = token.s.layers;
    using Part = void (Token::*)(CudaStream&, std::int64_t) const;
    const auto in_all_layers = [&](const std::vector<Part>& parts) {
      for (std::int64_t layer = 0; layer < layers; ++layer) {
        for (const Part part : parts) {
          (token.*part)(stream_, layer);
        }
      }
    };
    const auto time = [&](const char* what, double bytes, const std::vector<Part>& parts) {
      recorded(fmt::format("{}: {}", name, what), bytes, layers, [&] { in_all_layers(parts); });
    };
    const Token& t = token;
    const double projections = Token::bytes(
        {&t.q_weight, &t.k_weight, &t.v_weight, &t.o_gate_weight, &t.i_weight, &t.f_weight});
    const double mixer = Token::bytes({&t.k_cache, &t.v_cache, &t.c, &t.c});
    const double maps = Token::bytes({&t.map_q, &t.map_k});
    const double output = Token::bytes({&t.out_weight});
    const double gated = Token::bytes({&t.gate_weight, &t.up_weight});
    const double down = Token::bytes({&t.down_weight});
    const double head = Token::bytes({&t.head_weight});
    time("projections", projections, {&Token::projections});
    time("heads", maps, {&Token::heads});
    time("mixer", mixer, {&Token::mixer});
    time("output", output, {&Token::output});
    time("gate and up", gated, {&Token::gated});
    time("down", down, {&Token::down});
    time("gate, up and down", gated + down, {&Token::gated, &Token::down});
    time("heads and mixer", maps + mixer, {&Token::heads, &Token::mixer});
    time("projections to output",
         projections + maps + mixer + output,
         {&Token::projections, &Token::heads, &Token::mixer, &Token::output});
    time("products alone",
         projections + output + gated + down,
         {&Token::projections, &Token::output, &Token::gated, &Token::down});
    const std::vector<Part> layer{&Token::projections,
                                  &Token::heads,
                                  &Token::mixer,
                                  &Token::output,
                                  &Token::gated,
                                  &Token::down};
    const double all = projections + maps + mixer + output + gated + down;
    time("layers", all, layer);
    recorded(name + ": head", head, 1, [&] { token.head(stream_); });
    recorded(name + ": greedy draw", 0.0, 1, [&] { token.draw(stream_); });
    recorded(name + ": token", all + head, 1, [&] {
      in_all_layers(layer);
      token.head(stream_);
      token.draw(stream_);
    });
  }

  void time_model(const Shapes& shapes) {
    const Token token(shapes);
    set_kernel_choice(KernelChoice::portable);
    time_token(token, fmt::format("{}, portable", shapes.name));
    set_kernel_choice(KernelChoice::automatic);
    time_token(token, shapes.name);
  }
};

TEST_F(CudaDecodeSpeed, Qwen35) {
  time_model({"Qwen3.5-4B", 32, 16, 4, 256, 9216, 248320});
}

TEST_F(CudaDecodeSpeed, Qwen3) {
  time_model({"Qwen3-4B", 36, 32, 8, 128, 9728, 151936});
}

}  // namespace
}  // namespace bifocal
