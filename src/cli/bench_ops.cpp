// `bifocal bench ops`: single ops at a model's sizes, one layer of one row.
#include <algorithm>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/bench_command.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "core/random.h"
#include "ops/fill.h"
#include "ops/transfer.h"
#include "plan/parameter_table.h"
#include "plan/step_flop.h"

namespace bifocal {

namespace {

struct OpsOptions {
  BenchSettings settings;
  std::string model = "qwen3-4b";
  std::int64_t documents = 0;
  std::int64_t window = 448;
  std::vector<std::string> only;
};

// What the ops are run on, and the rows of the table.
class OpsBench {
 public:
  OpsBench(Context context,
           const ModelConfig& model,
           const RunConfig& config,
           const OpsOptions& options,
           BenchReport& report)
      : context_(context),
        model_(model),
        config_(config),
        options_(options),
        report_(report),
        documents_(document_lengths(config.data.row_tokens, options.documents)),
        tokens_(config.data.row_tokens) {}

  // Runs the cases that were asked for. A case that fails is reported and the others go on; throws
  // Error at the end.
  void run_all();

 private:
  using Case = void (OpsBench::*)();

  void layer_products();
  void attention();
  void mlstm();
  void features();
  void kl_head();
  void adamw();
  void norms();
  void swiglu();
  void rope();
  void gate();
  void embedding();

  // ---- tensors ----
  DType type() const { return context_.dtype; }

  DType sum_type() const { return context_.sum_type(); }

  Tensor empty(DType dtype, const Shape& shape) {
    return context_.memory.empty(Region::activations, dtype, shape);
  }

  Tensor zeros(Region region, DType dtype, const Shape& shape) {
    Tensor x = context_.memory.empty(region, dtype, shape);
    run(context_.stream, Zero{.x = x});
    return x;
  }

  Tensor random(const Shape& shape, double deviation = 1.0) {
    return random_of(type(), shape, deviation);
  }

  Tensor random_of(DType dtype, const Shape& shape, double deviation, double mean = 0.0);
  Tensor starts();
  Tensor key_begin(std::int64_t window);

  template <class T>
  Tensor from(const std::vector<T>& values) {
    Tensor x = empty(kDTypeOf<T>, {static_cast<std::int64_t>(values.size())});
    run(context_.stream, Upload{.y = x, .x = {values.data(), kDTypeOf<T>, x.shape()}});
    return x;
  }

  // ---- rows ----
  bool wants(const std::string& name) const {
    const std::vector<std::string>& only = options_.only;
    return only.empty() || std::ranges::any_of(only, [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  }

  // One op after another, of these costs.
  void time(const std::string& name,
            const std::vector<OpCost>& costs,
            const std::function<void()>& run_ops);

  template <class Op>
  void time_op(const std::string& name, const Op& op) {
    time(name, {cost(op)}, [&] { run(context_.stream, op); });
  }

  Context context_;
  const ModelConfig& model_;
  const RunConfig& config_;
  const OpsOptions& options_;
  BenchReport& report_;
  std::vector<std::int64_t> documents_;
  std::int64_t tokens_;
  std::uint64_t next_stream_ = 0;
};

Tensor OpsBench::random_of(DType dtype, const Shape& shape, double deviation, double mean) {
  Tensor x = empty(dtype, shape);
  if (mean != 0.0) {  // small tensors alone
    const std::uint64_t stream = next_stream_++;
    std::vector<float> values(static_cast<std::size_t>(x.size()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(mean + deviation * random_normal(1, stream, i));
    }
    const Tensor single = from(values);
    run(context_.stream, Cast{.y = x, .x = single.reshape(shape)});
    return x;
  }
  run(context_.stream,
      FillNormal{.x = x, .seed = 1, .stream = next_stream_++, .deviation = deviation});
  return x;
}

Tensor OpsBench::starts() {
  std::vector<std::uint8_t> values;
  for (const std::int64_t tokens : documents_) {
    values.push_back(1);
    values.resize(values.size() + static_cast<std::size_t>(tokens) - 1, 0);
  }
  return from(values);
}

// window 0: the whole document.
Tensor OpsBench::key_begin(std::int64_t window) {
  std::vector<std::int32_t> values;
  for (const std::int64_t tokens : documents_) {
    const auto start = static_cast<std::int64_t>(values.size());
    for (std::int64_t t = start; t < start + tokens; ++t) {
      const std::int64_t first = window == 0 ? start : std::max(start, t - window + 1);
      values.push_back(static_cast<std::int32_t>(first));
    }
  }
  return from(values);
}

void OpsBench::time(const std::string& name,
                    const std::vector<OpCost>& costs,
                    const std::function<void()>& run_ops) {
  if (!wants(name)) {
    return;
  }
  const BenchSettings& settings = options_.settings;
  OpCost all;
  double floor = 0.0;
  for (const OpCost& one : costs) {
    all += one;
    floor += floor_seconds(one, settings.rates());
  }
  report_.add(time_row(name,
                       "ms",
                       measure(context_.stream, settings.warmups, settings.repeats, run_ops),
                       all,
                       floor));
}

void OpsBench::layer_products() {
  struct Product {
    const char* name;
    std::int64_t in, out;
  };

  const std::int64_t width = model_.attention_width();
  for (const Product& product :
       {Product{"linear_qkv", model_.hidden, width + 2 * model_.kv_width()},
        Product{"linear_o", width, model_.hidden},
        Product{"linear_gate_up", model_.hidden, 2 * model_.intermediate},
        Product{"linear_down", model_.intermediate, model_.hidden}}) {
    const std::string name = product.name;
    const bool backward = wants(name + "_backward");
    if (!wants(name) && !backward) {
      continue;
    }
    const Tensor x = random({tokens_, product.in});
    const Tensor weight = random({product.out, product.in}, 0.02);
    const Tensor y = empty(type(), {tokens_, product.out});
    time_op(name, LinearForward{.y = y, .x = x, .weight = weight});
    if (!backward) {
      continue;
    }
    const Tensor d_y = random(y.shape());
    const Tensor d_x = empty(type(), x.shape());
    const Tensor d_weight = zeros(Region::gradients, sum_type(), weight.shape());
    const LinearBackwardInput input{.d_x = d_x, .d_y = d_y, .weight = weight};
    const LinearBackwardWeight weights{.d_weight = d_weight, .d_y = d_y, .x = x};
    time(name + "_backward", {cost(input), cost(weights)}, [&] {
      run(context_.stream, input);
      run(context_.stream, weights);
    });
  }
}

void OpsBench::attention() {
  const std::string window = fmt::format("swa{}_", options_.window);
  const bool both = wants(window + "forward_backward");
  if (!wants("teacher_attention") && !wants(window + "forward") && !both) {
    return;
  }
  const Tensor q = random({tokens_, model_.heads, model_.head_dim});
  const Tensor k = random({tokens_, model_.kv_heads, model_.head_dim});
  const Tensor v = random(k.shape());
  const Tensor full = key_begin(0);
  const Tensor near = key_begin(options_.window);
  const Tensor sink = random({model_.heads});
  const Tensor out = empty(type(), q.shape());
  const Tensor lse = empty(sum_type(), {tokens_, model_.heads});
  const SlidingAttentionForward whole{
      .out = out, .lse = lse, .inputs = {.q = q, .k = k, .v = v, .key_begin = full}};
  time("teacher_attention", {cost(whole, visible_pairs(documents_, 0))}, [&] {
    run(context_.stream, whole);
  });
  const SlidingAttentionForward forward{
      .out = out, .lse = lse, .inputs = {.q = q, .k = k, .v = v, .key_begin = near, .sink = sink}};
  const double pairs = visible_pairs(documents_, options_.window);
  time(window + "forward", {cost(forward, pairs)}, [&] { run(context_.stream, forward); });
  if (!both) {
    return;
  }
  const Tensor d_out = random(q.shape());
  const Tensor d_q = empty(type(), q.shape());
  const Tensor d_k = empty(type(), k.shape());
  const Tensor d_v = empty(type(), k.shape());
  const Tensor d_sink = zeros(Region::gradients, sum_type(), sink.shape());
  const SlidingAttentionBackward backward{.d_q = d_q,
                                          .d_k = d_k,
                                          .d_v = d_v,
                                          .d_sink = d_sink,
                                          .d_out = d_out,
                                          .out = out,
                                          .lse = lse,
                                          .inputs = forward.inputs};
  time(window + "forward_backward", {cost(forward, pairs), cost(backward, pairs)}, [&] {
    run(context_.stream, forward);
    run(context_.stream, backward);
  });
}

void OpsBench::mlstm() {
  if (!wants("mlstm_forward") && !wants("mlstm_forward_backward")) {
    return;
  }
  // Features are softmaxes: positive and of sum 1, which exp(normal) / sum is.
  const auto feature_rows = [&](std::int64_t heads) {
    const Tensor x = random({tokens_, heads, model_.head_dim});
    const Tensor weight = random({heads, model_.head_dim, model_.head_dim}, 0.1);
    Tensor y = empty(type(), x.shape());
    run(context_.stream, FeatureMapForward{.y = y, .x = x, .weight = weight});
    return y;
  };
  const std::int64_t states = model_.kv_heads;
  const Tensor q = feature_rows(model_.heads);
  const Tensor k = feature_rows(states);
  const Tensor v = random({tokens_, states, model_.head_dim});
  const Tensor i_gate = random_of(sum_type(), {tokens_, states}, 1.0);
  const Tensor f_gate = random_of(sum_type(), {tokens_, states}, 1.0, 4.0);
  const Tensor first = starts();
  const Tensor h = empty(type(), q.shape());
  const MlstmForward forward{
      .h = h,
      .inputs = {.q = q, .k = k, .v = v, .i_gate = i_gate, .f_gate = f_gate, .starts = first}};
  time("mlstm_forward", {cost(forward, kCountedChunk)}, [&] { run(context_.stream, forward); });
  if (!wants("mlstm_forward_backward")) {
    return;
  }
  const Tensor d_h = random(q.shape());
  const Tensor d_q = empty(type(), q.shape());
  const Tensor d_k = empty(type(), k.shape());
  const Tensor d_v = empty(type(), v.shape());
  const Tensor d_i = empty(sum_type(), i_gate.shape());
  const Tensor d_f = empty(sum_type(), f_gate.shape());
  const MlstmBackward backward{.d_q = d_q,
                               .d_k = d_k,
                               .d_v = d_v,
                               .d_i_gate = d_i,
                               .d_f_gate = d_f,
                               .d_h = d_h,
                               .h = h,
                               .inputs = forward.inputs};
  time(
      "mlstm_forward_backward", {cost(forward, kCountedChunk), cost(backward, kCountedChunk)}, [&] {
        run(context_.stream, forward);
        run(context_.stream, backward);
      });
}

// Queries and keys, as a layer has them.
void OpsBench::features() {
  if (!wants("feature_maps") && !wants("feature_maps_backward")) {
    return;
  }

  struct Side {
    Tensor x, weight, y, d_y, d_x, d_weight;
  };

  std::vector<Side> sides;
  for (const std::int64_t heads : {model_.heads, model_.kv_heads}) {
    const Shape shape{tokens_, heads, model_.head_dim};
    const Shape square{heads, model_.head_dim, model_.head_dim};
    sides.push_back({random(shape),
                     random(square, 0.1),
                     empty(type(), shape),
                     random(shape),
                     zeros(Region::activations, type(), shape),
                     zeros(Region::gradients, sum_type(), square)});
  }
  const auto forward = [](const Side& s) {
    return FeatureMapForward{.y = s.y, .x = s.x, .weight = s.weight};
  };
  const auto backward = [](const Side& s) {
    return FeatureMapBackward{
        .d_x = s.d_x, .d_weight = s.d_weight, .d_y = s.d_y, .y = s.y, .x = s.x, .weight = s.weight};
  };
  time("feature_maps", {cost(forward(sides[0])), cost(forward(sides[1]))}, [&] {
    run(context_.stream, forward(sides[0]));
    run(context_.stream, forward(sides[1]));
  });
  for (const Side& side : sides) {
    run(context_.stream, forward(side));
  }
  time("feature_maps_backward", {cost(backward(sides[0])), cost(backward(sides[1]))}, [&] {
    run(context_.stream, backward(sides[0]));
    run(context_.stream, backward(sides[1]));
  });
}

// Logits of both models by chunks, the loss, and the gradients of hidden states and head.
void OpsBench::kl_head() {
  if (!wants("kl_head")) {
    return;
  }
  const std::int64_t chunk = std::min(tokens_, config_.memory.logit_chunk);
  const Shape row{tokens_, model_.hidden};
  const Shape matrix{model_.vocabulary, model_.hidden};
  const Tensor hidden = random(row);
  const Tensor teacher_hidden = random(row);
  const Tensor weight = random(matrix, 0.02);
  const Tensor teacher_weight = random(matrix, 0.02);
  const Tensor d_hidden = empty(type(), row);
  const Tensor d_weight = zeros(Region::gradients, sum_type(), matrix);
  const Shape square{chunk, model_.vocabulary};
  const Tensor logits = context_.memory.empty(Region::loss, sum_type(), square);
  const Tensor teacher_logits = context_.memory.empty(Region::loss, sum_type(), square);
  // In place where the types agree.
  const Tensor own =
      type() == sum_type() ? Tensor() : context_.memory.empty(Region::loss, type(), square);
  const Tensor kl = empty(DType::f64, {chunk});
  const Tensor kl_weight = from(
      std::vector<double>(static_cast<std::size_t>(chunk), 1.0 / static_cast<double>(tokens_)));
  std::vector<OpCost> costs;
  const auto chunks = [&](bool only_count) {
    const auto queue = [&](const auto& op) {
      if (only_count) {
        costs.push_back(cost(op));
      } else {
        run(context_.stream, op);
      }
    };
    for (std::int64_t begin = 0; begin < tokens_; begin += chunk) {
      const std::int64_t end = std::min(tokens_, begin + chunk);
      const TensorView own_logits = logits.rows(0, end - begin);
      const TensorView their_logits = teacher_logits.rows(0, end - begin);
      const TensorView d_logits = own ? own.rows(0, end - begin) : own_logits;
      queue(LinearForward{.y = own_logits, .x = hidden.rows(begin, end), .weight = weight});
      queue(LinearForward{
          .y = their_logits, .x = teacher_hidden.rows(begin, end), .weight = teacher_weight});
      queue(DistillLoss{.d_student = d_logits,
                        .kl = kl.rows(0, end - begin),
                        .student = own_logits,
                        .teacher = their_logits,
                        .kl_weight = kl_weight.rows(0, end - begin)});
      queue(LinearBackwardWeight{
          .d_weight = d_weight, .d_y = d_logits, .x = hidden.rows(begin, end)});
      queue(
          LinearBackwardInput{.d_x = d_hidden.rows(begin, end), .d_y = d_logits, .weight = weight});
    }
  };
  chunks(true);
  time("kl_head", costs, [&] { chunks(false); });
}

// The norm and the update of a whole model.
void OpsBench::adamw() {
  if (!wants("adamw")) {
    return;
  }
  ModelConfig student = model_;
  student.mixers =
      make_mixers(config_.student.preset, config_.student.budget, config_.student.mixers, model_);
  const Shape all{ParameterTable(student).total()};
  const Tensor parameter = random_of(sum_type(), all, 0.02);
  const Tensor gradient = random_of(sum_type(), all, 1e-3);
  const Tensor first = zeros(Region::optimizer, sum_type(), all);
  const Tensor second = zeros(Region::optimizer, sum_type(), all);
  const Tensor sum = zeros(Region::optimizer, DType::f64, {1});
  const Tensor copy = type() == sum_type() ? Tensor() : empty(type(), all);
  const SumOfSquares norm{.sum = sum, .x = gradient};
  const AdamW update{.parameter = parameter,
                     .first = first,
                     .second = second,
                     .gradient = gradient,
                     .copy = copy,
                     .rate = 1e-5,
                     .decay = 0.1};
  time("adamw", {cost(norm), cost(update)}, [&] {
    run(context_.stream, norm);
    run(context_.stream, update);
  });
}

void OpsBench::norms() {
  if (!wants("rms_norm") && !wants("rms_norm_backward")) {
    return;
  }
  const Tensor x = random({tokens_, model_.hidden});
  const Tensor weight = random({model_.hidden});
  const Tensor y = empty(type(), x.shape());
  time_op("rms_norm", RmsNormForward{.y = y, .x = x, .weight = weight});
  const Tensor d_y = random(x.shape());
  const Tensor d_weight = zeros(Region::gradients, sum_type(), weight.shape());
  time_op("rms_norm_backward",
          RmsNormBackward{.d_x = y,
                          .d_weight = d_weight,
                          .d_y = d_y,
                          .x = x,
                          .weight = weight,
                          .accumulate = true});
}

void OpsBench::swiglu() {
  if (!wants("swiglu") && !wants("swiglu_backward")) {
    return;
  }
  const Shape shape{tokens_, model_.intermediate};
  const Tensor gate = random(shape);
  const Tensor up = random(shape);
  const Tensor y = empty(type(), shape);
  time_op("swiglu", SwigluForward{.y = y, .gate = gate, .up = up});
  const Tensor d_y = random(shape);
  const Tensor d_gate = empty(type(), shape);
  time_op("swiglu_backward",
          SwigluBackward{.d_gate = d_gate, .d_up = y, .d_y = d_y, .gate = gate, .up = up});
}

void OpsBench::rope() {
  if (!wants("rope")) {
    return;
  }
  const Tensor x = random({tokens_, model_.heads, model_.head_dim});
  const Tensor cos = random_of(sum_type(), {tokens_, model_.head_dim / 2}, 0.5);
  const Tensor sin = random_of(sum_type(), {tokens_, model_.head_dim / 2}, 0.5);
  time_op("rope", RopeRotate{.x = x, .cos = cos, .sin = sin});
}

void OpsBench::gate() {
  if (!wants("gate") && !wants("gate_backward")) {
    return;
  }
  const Tensor far = random({tokens_, model_.heads, model_.head_dim});
  const Tensor near = random(far.shape());
  const Tensor weight = random({tokens_, model_.heads});
  const Tensor y = empty(type(), far.shape());
  time_op("gate", BifocalGateForward{.y = y, .far = far, .near = near, .gate = weight});
  const Tensor d_y = random(far.shape());
  const Tensor d_near = empty(type(), far.shape());
  const Tensor d_gate = empty(type(), weight.shape());
  time_op("gate_backward",
          BifocalGateBackward{.d_far = y,
                              .d_near = d_near,
                              .d_gate = d_gate,
                              .d_y = d_y,
                              .far = far,
                              .near = near,
                              .gate = weight});
}

void OpsBench::embedding() {
  if (!wants("embedding") && !wants("embedding_backward")) {
    return;
  }
  const Tensor ids = from(random_bench_row(documents_, model_.vocabulary, 1).ids);
  const Shape table{model_.vocabulary, model_.hidden};
  const Tensor y = empty(type(), {tokens_, model_.hidden});
  {
    const Tensor weight = random(table, 0.02);
    time_op("embedding", EmbeddingForward{.y = y, .ids = ids, .table = weight});
  }
  const Tensor d_table = zeros(Region::gradients, sum_type(), table);
  const Tensor d_y = random(y.shape());
  time_op("embedding_backward", EmbeddingBackward{.d_table = d_table, .d_y = d_y, .ids = ids});
}

void OpsBench::run_all() {
  std::string failures;
  for (const Case& one : {&OpsBench::layer_products,
                          &OpsBench::attention,
                          &OpsBench::mlstm,
                          &OpsBench::features,
                          &OpsBench::kl_head,
                          &OpsBench::adamw,
                          &OpsBench::norms,
                          &OpsBench::swiglu,
                          &OpsBench::rope,
                          &OpsBench::gate,
                          &OpsBench::embedding}) {
    try {
      (this->*one)();
    } catch (const Error& error) {
      failures += fmt::format("\n{}", error.what());
    }
  }
  BIFOCAL_REQUIRE(failures.empty(), "[bench] not everything could be measured:{}", failures);
}

void bench_ops(const RunConfig& config, const OpsOptions& options) {
  BenchReport report(options.settings, "bench ops", true);
  const ModelConfig model = bench_model(options.model);
  Session session(config, make_self_communicator());
  report.note(fmt::format("{}: {} tokens in {} document(s), {}, window {}",
                          options.model,
                          config.data.row_tokens,
                          document_lengths(config.data.row_tokens, options.documents).size(),
                          name_of(session.context().dtype),
                          options.window));
  OpsBench(session.context(), model, config, options, report).run_all();
}

}  // namespace

void add_bench_ops_command(CLI::App& bench, const CommandContext& context) {
  CLI::App* command =
      bench.add_subcommand("ops", "Single ops at the sizes of one layer and one row of a model");
  auto options = std::make_shared<OpsOptions>();
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  command
      ->add_option(
          "--model", options->model, "qwen3-4b, qwen3.5-4b, tiny, or the path of a config.json")
      ->capture_default_str();
  command->add_option("--documents", options->documents, "Tokens of each document; 0: one document")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--window", options->window, "Window of the sliding attention")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--only", options->only, "Rows whose names hold one of these texts");
  options->settings.add_to(*command);
  command->callback([options, config, &context] {
    require_one_rank(context, "bench ops");
    bench_ops(config->resolve(), *options);
  });
}

}  // namespace bifocal
