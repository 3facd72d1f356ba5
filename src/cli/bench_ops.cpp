// `bifocal bench ops`: single ops at a model's sizes, one layer of one row.
#include "cli/bench_ops.h"

#include <algorithm>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/bench_command.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "core/random.h"
#include "plan/parameter_table.h"

namespace bifocal {

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

// Logits of both models by chunks, the loss, and the gradients of hidden states and head.
void OpsBench::kl_head() {
  if (!wants("kl_head")) {
    return;
  }
  const std::int64_t chunk = std::min(tokens_, resolved_logit_chunk(config_));
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

namespace {

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
