// One golden teacher and student on any number of ranks.
#include <gtest/gtest.h>

#include "distill/align_stage.h"
#include "distill/logit_stage.h"
#include "ops/elementwise.h"
#include "support/compare.h"
#include "support/device_values.h"
#include "support/fill_weights.h"
#include "support/golden.h"
#include "support/golden_checks.h"
#include "train/optimizer.h"

namespace bifocal::test {

namespace {

ModelConfig golden_model(const GoldenFile& file) {
  ModelConfig config;
  config.vocabulary = static_cast<std::int64_t>(file.number("vocab"));
  config.hidden = static_cast<std::int64_t>(file.number("hidden"));
  config.intermediate = static_cast<std::int64_t>(file.number("intermediate"));
  config.layers = static_cast<std::int64_t>(file.number("layers"));
  config.heads = static_cast<std::int64_t>(file.number("H"));
  config.kv_heads = static_cast<std::int64_t>(file.number("G"));
  config.head_dim = static_cast<std::int64_t>(file.number("d"));
  config.norm_eps = file.number("eps");
  config.rope_theta = file.number("theta");
  config.qk_norm = file.number("qk_norm") != 0.0;
  config.max_position = 1024;
  config.mixers = golden_model_settings(file);
  return config;
}

ModelConfig as_teacher(ModelConfig config) {
  config.mixers.assign(static_cast<std::size_t>(config.layers), MixerSettings{});
  return config;
}

Row golden_row(const GoldenFile& file) {
  Row row;
  row.start = file.starts();
  const std::size_t tokens = row.start.size();
  for (std::size_t token = 0; token < tokens; ++token) {
    row.ids.push_back(static_cast<std::int32_t>(file.values("in/ids")[token]));
    row.keep.push_back(static_cast<std::uint8_t>(file.values("in/keep")[token]));
    const bool last = token + 1 == tokens || row.start[token + 1] != row.start[token];
    row.next.push_back(last ? -1 : static_cast<std::int32_t>(file.values("in/ids")[token + 1]));
  }
  return row;
}

class ModelCheck {
 public:
  ModelCheck(const std::filesystem::path& path,
             const GoldenModelRun& run,
             std::unique_ptr<Communicator> world,
             Backend& backend,
             GoldenValues* kept = nullptr)
      : path_(path),
        file_(path),
        run_(run),
        kept_(kept),
        tolerance_(golden_tolerance(run.dtype, path)),
        mesh_(std::move(world), {.data = 1, .sequence = 0}),
        context_{backend.stream(), backend.memory(), run.dtype},
        config_(golden_model(file_)),
        teacher_table_(as_teacher(config_)),
        student_table_(config_),
        teacher_weights_(context_,
                         teacher_table_,
                         mesh_.world(),
                         {Weights::Placement::sharded, run.dtype, Region::teacher_weights}),
        student_weights_(
            context_,
            student_table_,
            mesh_.world(),
            {run.sharded_weights ? Weights::Placement::sharded : Weights::Placement::replicated,
             run.dtype,
             Region::weights,
             true}),
        teacher_(context_, as_teacher(config_), teacher_weights_),
        student_(context_, config_, student_weights_),
        gradients_(context_, student_table_, mesh_.world()),
        row_(golden_row(file_)) {
    load(teacher_weights_, "teacher");
    load(student_weights_, "student");
  }

  void run_all() {
    check_logits("out/teacher_logits", teacher_);
    check_logits("out/student_logits", student_);
    check_align();
    check_distill("out/distill_loss", "grad_distill", {});
    check_distill(
        "out/distill_t2_ce25_loss", "grad_distill_t2_ce25", {.temperature = 2.0, .ce_share = 0.25});
    check_ten_steps();
  }

 private:
  void load(Weights& weights, const std::string& group) {
    fill_weights(
        context_,
        weights,
        [&](const Parameter& parameter, std::int64_t first, const TensorView& destination) {
          CpuStream cpu;
          const Tensor whole = file_.tensor(host_, DType::f64, group + "/" + parameter.name);
          const ConstTensorView flat = whole.reshape({whole.size()});
          run(cpu, Cast{.y = destination, .x = flat.rows(first, first + destination.size())});
        });
    weights.share();
  }

  StageRows rows(std::int64_t steps) const {
    return {
        .row = [this](std::int64_t) { return row_; }, .first = 0, .per_step = 1, .steps = steps};
  }

  TeacherPlacement placement() const {
    return run_.ulysses ? TeacherPlacement::ulysses : TeacherPlacement::look_ahead;
  }

  // Keeps values instead, where they are not to be judged.
  bool keeps(const std::string& name,
             const std::vector<double>& got,
             const std::vector<double>& want) const {
    if (kept_ != nullptr) {
      (*kept_)[name] = {got, want};
    }
    return kept_ != nullptr;
  }

  void compare(const std::string& name, const std::vector<double>& got, double bound) const {
    if (keeps(name, got, file_.values(name))) return;
    const Difference d = difference(got, file_.values(name));
    EXPECT_LE(d.largest, bound) << path_.filename() << " " << name << " on " << mesh_.world().size()
                                << " ranks: " << d.describe();
  }

  void check_logits(const std::string& name, Decoder& decoder) {
    RowShard shard = make_row_shard(context_, row_, mesh_.sequence());
    const Tensor hidden = decoder.forward(shard.layout, shard.ids);
    const Tensor logits = context_.memory.empty(
        Region::loss, sum_type(run_.dtype), {shard.layout.tokens(), config_.vocabulary});
    Head(context_, config_, decoder.weights()).logits(hidden, logits);
    const std::vector<double>& all = file_.values(name);
    const auto first = all.begin() + shard.layout.begin() * config_.vocabulary;
    const std::vector<double> want(first, first + logits.size());
    const std::vector<double> got = values_of(context_, logits);
    if (keeps(name, got, want)) return;
    const Difference d = difference(got, want);
    EXPECT_LE(d.largest, tolerance_.output * d.scale)
        << path_.filename() << " " << name << ": " << d.describe();
  }

  // Every parameter's gradient on every rank: this rank's pieces against the golden tensor.
  void check_gradients(const std::string& group, const std::vector<double>& unit_factors) {
    const double floor = 0.01 * file_.largest(group);
    for (std::size_t unit = 0; unit < student_table_.units().size(); ++unit) {
      const TensorView part = gradients_.part(static_cast<std::int64_t>(unit));
      const std::vector<double> got = values_of(context_, part);
      const std::int64_t begin = part.size() * mesh_.world().rank();
      for (const ParameterPiece& piece :
           pieces_in(student_table_, static_cast<std::int64_t>(unit), begin, begin + part.size())) {
        const std::string name = group + "/" + piece.parameter->name;
        const std::vector<double>& want = file_.values(name);
        double scale = floor;
        for (const double value : want) scale = std::max(scale, std::abs(value));
        std::vector<double> own(got.begin() + piece.offset,
                                got.begin() + piece.offset + piece.count);
        for (double& value : own) value *= unit_factors[unit];
        const auto first = want.begin() + piece.first;
        const std::vector<double> own_want(first, first + piece.count);
        if (keeps(name, own, own_want)) continue;
        EXPECT_LE(difference(own, own_want).largest, tolerance_.gradient * scale)
            << path_.filename() << " " << name << " on " << mesh_.world().size() << " ranks";
      }
    }
  }

  // Align's golden gradients are of the mean over layers, ours of each layer's own loss. Tensors
  // outside the mixers have zero gradient there, and with trainable = mixer the golden ones of q,
  // k, v are compared too.
  void check_align() {
    if (mesh_.world().size() > 1 && !run_.ulysses)
      return;  // one row: look-ahead would need a row for every rank
    AlignStage stage(
        context_, student_, teacher_, mesh_, placement(), AlignTrainable::mixer, rows(1));
    gradients_.clear();
    StepResult result = stage.run_step(0, gradients_);
    compare("out/align_loss",
            {result.loss},
            tolerance_.output * std::abs(file_.values("out/align_loss")[0]));
    for (double& factor : result.unit_factors) factor /= static_cast<double>(config_.layers);
    check_gradients("grad_align", result.unit_factors);
  }

  void check_distill(const std::string& loss_name,
                     const std::string& group,
                     LogitLossOptions options) {
    options.chunk = 7;  // no divisor of anything
    LogitStage stage(
        context_, student_, &teacher_, mesh_, placement(), run_.recompute, options, rows(1));
    gradients_.clear();
    const StepResult result = stage.run_step(0, gradients_);
    compare(loss_name, {result.loss}, tolerance_.output * std::abs(file_.values(loss_name)[0]));
    check_gradients(group, result.unit_factors);
  }

  void check_ten_steps() {
    RunConfig::Optimizer settings{.beta1 = file_.number("steps.beta1"),
                                  .beta2 = file_.number("steps.beta2"),
                                  .eps = file_.number("steps.eps"),
                                  .decay = file_.number("steps.decay_matrices")};
    Optimizer optimizer(context_, student_weights_, settings);
    const double rate = file_.number("steps.lr");
    LogitStage stage(
        context_, student_, &teacher_, mesh_, placement(), run_.recompute, {.chunk = 64}, rows(10));
    std::vector<double> losses;
    std::vector<double> norms;
    for (std::int64_t step = 0; step < 10; ++step) {
      gradients_.clear();
      const StepResult result = stage.run_step(step, gradients_);
      losses.push_back(result.loss);
      norms.push_back(
          optimizer.update({.trains = [&](const Parameter& p) { return stage.trains(p); },
                            .rate = [&](const Parameter&) { return rate; },
                            .decays = [](const Parameter& p) { return p.shape.rank() >= 2; },
                            .clip_scope = stage.clip_scope(),
                            .clip = file_.number("steps.clip_norm"),
                            .unit_factors = result.unit_factors,
                            .unit_squares = result.unit_squares,
                            .number = step + 1},
                           gradients_));
    }
    const bool exact = run_.dtype == DType::f64;
    check_relative("steps/loss", losses, exact ? 1e-9 : 1e-4);
    check_relative("steps/grad_norm", norms, exact ? 1e-9 : 2e-4);
    check_parameters(exact ? 1e-9 : 2e-5);
  }

  void check_relative(const std::string& name, const std::vector<double>& got, double bound) const {
    const std::vector<double>& want = file_.values(name);
    ASSERT_EQ(got.size(), want.size());
    if (keeps(name, got, want)) return;
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_LE(std::abs(got[i] - want[i]), bound * std::abs(want[i]))
          << path_.filename() << " " << name << " step " << i;
    }
  }

  void check_parameters(double bound) {
    for (std::size_t unit = 0; unit < student_table_.units().size(); ++unit) {
      const auto index = static_cast<std::int64_t>(unit);
      const std::vector<double> whole = values_of(context_, student_weights_.acquire(index));
      student_weights_.release(index);
      const Unit& range = student_table_.units()[unit];
      for (std::int64_t p = range.begin; p < range.end; ++p) {
        const Parameter& parameter = student_table_.parameters()[static_cast<std::size_t>(p)];
        const auto first = whole.begin() + parameter.offset;
        compare("steps/student/" + parameter.name,
                std::vector<double>(first, first + parameter.size()),
                bound);
      }
    }
  }

  std::filesystem::path path_;
  GoldenFile file_;
  GoldenModelRun run_;
  GoldenValues* kept_;  // null: values are judged
  GoldenTolerance tolerance_;
  Mesh mesh_;
  Memory host_;
  Context context_;
  ModelConfig config_;
  ParameterTable teacher_table_;
  ParameterTable student_table_;
  Weights teacher_weights_;
  Weights student_weights_;
  Decoder teacher_;
  Decoder student_;
  Gradients gradients_;
  Row row_;
};

}  // namespace

void check_golden_model(const std::filesystem::path& path,
                        const GoldenModelRun& run,
                        std::unique_ptr<Communicator> world,
                        Backend& backend) {
  ModelCheck(path, run, std::move(world), backend).run_all();
}

GoldenValues golden_model_values(const std::filesystem::path& path,
                                 const GoldenModelRun& run,
                                 std::unique_ptr<Communicator> world,
                                 Backend& backend) {
  GoldenValues values;
  ModelCheck(path, run, std::move(world), backend, &values).run_all();
  return values;
}

void check_golden_model(const std::filesystem::path& path,
                        const GoldenModelRun& run,
                        std::unique_ptr<Communicator> world) {
  const std::unique_ptr<Backend> cpu = make_cpu_backend(0);
  check_golden_model(path, run, std::move(world), *cpu);
}

}  // namespace bifocal::test
