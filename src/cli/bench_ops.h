// Single ops at a model's sizes: what they are run on, and the cases by name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "config/run_config.h"
#include "ops/fill.h"
#include "ops/transfer.h"

namespace bifocal {

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

}  // namespace bifocal
