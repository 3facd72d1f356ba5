// Models and data for commands.
#include "cli/session.h"

#include <algorithm>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "core/random.h"
#include "hf/hf_config.h"
#include "hf/model_tensors.h"
#include "plan/plan.h"
#include "plan/start_values.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

// Whether bfloat16 holds every tensor of the model without rounding.
bool all_bfloat16(const SafetensorsReader& reader, const ModelConfig& config) {
  const ParameterTable table(config);
  return std::all_of(
      table.parameters().begin(), table.parameters().end(), [&](const Parameter& parameter) {
        return reader.contains(parameter.name) && reader.at(parameter.name).dtype == DType::bf16;
      });
}

bool has_weights(const fs::path& directory) {
  return !directory.empty() && (fs::exists(directory / "model.safetensors") ||
                                fs::exists(directory / "model.safetensors.index.json"));
}

RowSourceOptions row_options(const RunConfig& config, std::int64_t vocabulary, Split split) {
  return {.mixture = data_mixture(config),
          .split = split,
          .row_tokens = config.data.row_tokens,
          .long_documents =
              config.data.long_documents == "drop" ? LongDocuments::drop : LongDocuments::cut,
          .keep = config.data.keep == "assistant" ? Keep::assistant : Keep::all,
          .seed = static_cast<std::uint64_t>(config.data.seed),
          .vocabulary = vocabulary,
          .pad_id = 0};
}

std::vector<ShardedTensor> weight_tensors(Weights& weights) {
  std::vector<ShardedTensor> tensors;
  weights.fill([&](const Parameter& parameter, std::int64_t begin, const TensorView& piece) {
    tensors.push_back({.name = parameter.name,
                       .global = parameter.shape,
                       .begin = begin,
                       .end = begin + piece.size(),
                       .data = piece});
  });
  return tensors;
}

// The checkpoint must hold every copied tensor; new ones are optional unless its own config has
// them.
void check_source(const SafetensorsReader& reader, const fs::path& directory) {
  check_model_tensors(reader, ParameterTable(read_hf_config(directory)));
}

}  // namespace

std::optional<fs::path> find_checkpoint(const fs::path& path) {
  if (fs::exists(path / "manifest.json")) {
    return path;
  }
  const bool is_run = fs::is_directory(path / "checkpoints");
  std::optional<fs::path> newest = latest_checkpoint(is_run ? path / "checkpoints" : path);
  BIFOCAL_REQUIRE(
      newest.has_value() || !is_run,
      "[model] {} is a run directory without a complete checkpoint: let the run save one",
      path.string());
  return newest;
}

StartValues start_values(const RunConfig::Student& student) {
  return {.sink = student.sink_start,
          .forget_bias_first = student.forget_bias_first,
          .forget_bias_last = student.forget_bias_last,
          .output_bias = student.output_bias};
}

Session::Session(const RunConfig& config)
    : dtype_(config.run.dtype == "float64" ? DType::f64 : DType::f32),
      memory_(static_cast<std::size_t>(config.memory.limit_gib * 1024.0 * 1024.0 * 1024.0)) {}

void fill_random(const Parameter& parameter,
                 std::uint64_t seed,
                 std::int64_t begin,
                 const TensorView& piece) {
  const bool is_norm = parameter.name.find("norm") != std::string::npos;
  const bool is_bias = parameter.name.ends_with(".bias");
  const std::uint64_t stream = stream_of(parameter.name);
  dispatch_real("random", piece.dtype, [&]<class T>(T) {
    T* values = piece.as<T>();
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      const double normal =
          0.02 * random_normal(seed, stream, static_cast<std::uint64_t>(begin + i));
      values[i] = static_cast<T>(is_norm ? 1.0 : (is_bias ? 0.0 : normal));
    }
  });
}

LoadedModel::LoadedModel(Context context,
                         const ModelConfig& config,
                         Communicator& group,
                         const Weights::Options& options,
                         const std::function<void(Weights&)>& load)
    : config_(config),
      table_(config),
      weights_(std::make_unique<Weights>(context, table_, group, options)) {
  load(*weights_);
  weights_->share();
  decoder_ = std::make_unique<Decoder>(context, config_, *weights_);
}

LoadedModel load_model(Context context,
                       const ModelConfig& config,
                       const fs::path& directory,
                       Communicator& group,
                       const ModelPlacement& placement,
                       const RunConfig& run) {
  std::optional<SafetensorsReader> reader;
  if (has_weights(directory)) {
    reader.emplace(directory);
    check_source(*reader, directory);
  }
  Weights::Options options{placement.placement, context.dtype, placement.region};
  if (placement.frozen && reader && all_bfloat16(*reader, config)) {
    options.storage = DType::bf16;
  }
  const auto fill_piece =
      [&](const Parameter& parameter, std::int64_t begin, const TensorView& piece) {
        if (reader && reader->contains(parameter.name)) {
          reader->read(parameter.name, begin, piece);
        } else if (parameter.is_new()) {
          fill_start_values(parameter, start_values(run.student), begin, piece);
        } else {
          fill_random(parameter, static_cast<std::uint64_t>(run.run.seed), begin, piece);
        }
      };
  return {context, config, group, options, [&](Weights& weights) { weights.fill(fill_piece); }};
}

LoadedModel open_student(Context context,
                         const RunConfig& run,
                         const std::string& path,
                         Communicator& group,
                         const ModelPlacement& placement) {
  if (path.empty()) {
    return load_model(context, student_config(run), student_directory(run), group, placement, run);
  }
  const std::optional<fs::path> checkpoint = find_checkpoint(path);
  if (!checkpoint) {
    return load_model(context, read_hf_config(path), path, group, placement, run);
  }
  const CheckpointInfo info = read_checkpoint_info(*checkpoint);
  const ModelConfig config = parse_hf_config(info.model_config, checkpoint->string());
  const Weights::Options options{placement.placement, context.dtype, placement.region};
  return {context, config, group, options, [&](Weights& weights) {
            load_checkpoint(*checkpoint, weight_tensors(weights), group);
          }};
}

fs::path student_directory(const RunConfig& config) {
  return config.student.init.empty() ? config.teacher.path : config.student.init;
}

ModelConfig student_config(const RunConfig& config) {
  ModelConfig model = read_hf_config(student_directory(config));
  model.mixers =
      make_mixers(config.student.preset, config.student.budget, config.student.mixers, model);
  return model;
}

Mixture data_mixture(const RunConfig& config) {
  if (!config.data.mixture.empty()) {
    return read_mixture(config.data.mixture);
  }
  if (config.data.train.empty()) {
    return {};
  }
  return {{{.name = "data.train", .paths = config.data.train}}};
}

RowSource open_rows(const RunConfig& config, const ModelConfig& model, Split split) {
  require_rows_in_model(config, model);
  return RowSource(row_options(config, model.vocabulary, split));
}

RowSource open_rows(const RunConfig& config, Split split) {
  return RowSource(row_options(config, 0, split));
}

}  // namespace bifocal
