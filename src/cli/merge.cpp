// `bifocal merge`: a weighted average of students of one shape, as a Hugging Face directory.
#include <cmath>
#include <memory>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "checkpoint/checkpoint.h"
#include "cli/commands.h"
#include "cli/session.h"
#include "config/read.h"
#include "core/error.h"
#include "core/memory.h"
#include "hf/export.h"
#include "hf/hf_config.h"
#include "hf/model_tensors.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

struct MergeCommand {
  std::vector<std::string> students;  // Hugging Face directories, runs or checkpoints
  std::vector<double> weights;        // one each; empty: equal
  std::string teacher;                // where a checkpoint's teacher lies now
  std::string output;
  std::string dtype = "bfloat16";
  std::uint64_t shard_bytes = ExportOptions{}.shard_bytes;
};

// One of the averaged models.
class MergeSource {
 public:
  MergeSource(const std::string& path, const std::string& teacher) : path_(path) {
    const std::optional<fs::path> checkpoint = find_checkpoint(path);
    if (checkpoint) {
      const CheckpointInfo info = read_checkpoint_info(*checkpoint);
      RunConfig run = parse_run_config(info.configuration, checkpoint->string());
      run.teacher.path = teacher.empty() ? run.teacher.path : teacher;
      model_ = parse_hf_config(info.model_config, checkpoint->string());
      directory_ = student_directory(run);
      load(*checkpoint);
      return;
    }
    model_ = read_hf_config(path);
    directory_ = path;
    reader_.emplace(path);
    check_model_tensors(*reader_, ParameterTable(model_));
  }

  const std::string& path() const { return path_; }

  const ModelConfig& model() const { return model_; }

  // Where its tokenizer lies.
  const fs::path& directory() const { return directory_; }

  // sum += weight * parameter.
  void add_to(const Parameter& parameter, double weight, std::vector<double>& sum) {
    values_.resize(sum.size());
    if (reader_) {
      reader_->read(parameter.name, 0, {values_.data(), DType::f64, parameter.shape});
    } else {
      const auto* stored = loaded_.at(parameter.name).as<float>();
      std::copy(stored, stored + sum.size(), values_.begin());
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      sum[i] += weight * values_[i];
    }
  }

 private:
  void load(const fs::path& checkpoint) {
    const ParameterTable table(model_);
    std::vector<ShardedTensor> shards;
    for (const Parameter& parameter : table.parameters()) {
      const Tensor& tensor =
          loaded_
              .emplace(parameter.name,
                       memory_->empty(Region::weights, DType::f32, Shape{parameter.size()}))
              .first->second;
      shards.push_back({parameter.name, parameter.shape, 0, parameter.size(), tensor.view()});
    }
    load_checkpoint(checkpoint, shards, *make_self_communicator());
  }

  std::string path_;
  ModelConfig model_;
  fs::path directory_;
  std::optional<SafetensorsReader> reader_;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();
  std::map<std::string, Tensor> loaded_;  // a checkpoint's parameters
  std::vector<double> values_;
};

// Equal shares where none are given. Throws Error unless there is one a student and they sum to 1.
std::vector<double> checked_weights(const MergeCommand& command) {
  const std::size_t count = command.students.size();
  BIFOCAL_REQUIRE(count >= 2, "[merge] wanted at least two students, got {}", count);
  if (command.weights.empty()) {
    return std::vector<double>(count, 1.0 / static_cast<double>(count));
  }
  BIFOCAL_REQUIRE(command.weights.size() == count,
                  "[merge] wanted one --weights value for each of {} students, got {}",
                  count,
                  command.weights.size());
  double sum = 0.0;
  for (const double weight : command.weights) {
    BIFOCAL_REQUIRE(std::isfinite(weight), "[merge] wanted finite --weights, got {}", weight);
    sum += weight;
  }
  constexpr double kRounding = 1e-6;  // of decimal shares such as 0.333333
  BIFOCAL_REQUIRE(std::abs(sum - 1.0) <= kRounding,
                  "[merge] wanted --weights that sum to 1, got a sum of {}: a sum of another size "
                  "scales every matrix",
                  sum);
  return command.weights;
}

// Averages have a meaning only where the same tensors play the same part.
void require_one_shape(const MergeSource& first, const MergeSource& other) {
  const ModelConfig& a = first.model();
  const ModelConfig& b = other.model();
  const auto fields = [](const ModelConfig& m) {
    return fmt::format(
        "{} vocabulary {} hidden {} intermediate {} layers {} heads {}/{} of {} theta {} eps {} "
        "qk_norm {} qkv_bias {} tied {}",
        name_of(m.family),
        m.vocabulary,
        m.hidden,
        m.intermediate,
        m.layers,
        m.heads,
        m.kv_heads,
        m.head_dim,
        m.rope_theta,
        m.norm_eps,
        m.qk_norm,
        m.qkv_bias,
        m.tied);
  };
  BIFOCAL_REQUIRE(fields(a) == fields(b),
                  "[merge] wanted students of one shape, got {} ({}) and {} ({})",
                  first.path(),
                  fields(a),
                  other.path(),
                  fields(b));
  BIFOCAL_REQUIRE(a.rope_scaling == b.rope_scaling,
                  "[merge] {} and {} scale their rotary frequencies differently",
                  first.path(),
                  other.path());
  for (std::size_t layer = 0; layer < a.mixers.size(); ++layer) {
    BIFOCAL_REQUIRE(a.mixers[layer] == b.mixers[layer],
                    "[merge] layer {} of {} is {}, of {} it is {}: only equal mixers average",
                    layer,
                    first.path(),
                    describe(a.mixers[layer]),
                    other.path(),
                    describe(b.mixers[layer]));
  }
}

void run_merge(const MergeCommand& command) {
  const std::vector<double> weights = checked_weights(command);
  std::vector<MergeSource> sources;
  for (const std::string& path : command.students) {
    sources.emplace_back(path, command.teacher);
    require_one_shape(sources.front(), sources.back());
  }
  ExportOptions options;
  options.model = sources.front().model();
  options.tokenizer = sources.front().directory();
  options.teacher =
      command.teacher.empty() ? sources.front().directory() : fs::path(command.teacher);
  options.output = command.output;
  options.dtype = command.dtype == "float32" ? DType::f32 : DType::bf16;
  options.shard_bytes = command.shard_bytes;
  options.commit = BIFOCAL_COMMIT;
  options.origin = "merged:";
  for (std::size_t i = 0; i < sources.size(); ++i) {
    options.origin += fmt::format("{} {} x {}",
                                  i == 0 ? "" : " +",
                                  weights[i],
                                  fs::path(sources[i].path()).filename().string());
  }
  std::vector<double> sum;
  export_model(options, [&](const Parameter& parameter) -> ConstTensorView {
    sum.assign(static_cast<std::size_t>(parameter.size()), 0.0);
    for (std::size_t i = 0; i < sources.size(); ++i) {
      sources[i].add_to(parameter, weights[i], sum);
    }
    return {sum.data(), DType::f64, parameter.shape};
  });
  fmt::print("Wrote {}\n", command.output);
}

}  // namespace

void add_merge_command(CLI::App& app, const CommandContext& context) {
  auto command = std::make_shared<MergeCommand>();
  CLI::App* added = app.add_subcommand(
      "merge", "Average students of one shape, tensor by tensor, into a Hugging Face directory");
  added
      ->add_option(
          "students", command->students, "Hugging Face directories, run directories or checkpoints")
      ->required();
  added
      ->add_option("--weights",
                   command->weights,
                   "Share of each student, in order; they sum to 1 (default: equal)")
      ->delimiter(',');
  added->add_option("--teacher",
                    command->teacher,
                    "Teacher's directory: its licence goes into the model card, and tokenizers of "
                    "checkpoints are looked for there");
  added->add_option("--output", command->output, "Directory to write, absent or empty")->required();
  added->add_option("--dtype", command->dtype, "Type of the weights: bfloat16 or float32")
      ->check(CLI::IsMember({"bfloat16", "float32"}))
      ->capture_default_str();
  added->add_option("--shard-bytes", command->shard_bytes, "Most bytes of tensors in a weight file")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  added->callback([command, &context] {
    require_one_rank(context, "merge");
    run_merge(*command);
  });
}

}  // namespace bifocal
