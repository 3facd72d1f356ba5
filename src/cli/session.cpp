// Models and data for commands.
#include "cli/session.h"

#include <algorithm>
#include <optional>

#include "checkpoint/checkpoint.h"
#include "core/file.h"
#include "core/random.h"
#include "hf/hf_config.h"
#include "hf/json_fields.h"
#include "hf/model_tensors.h"
#include "model/host_images.h"
#include "ops/fill.h"
#include "plan/plan.h"
#include "plan/start_values.h"
#include "train/sharded_tensors.h"

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

namespace {

std::unique_ptr<Backend> open_backend(const RunConfig& config, Communicator& world) {
  const auto limit = static_cast<std::size_t>(config.memory.limit_gib * 1024.0 * 1024.0 * 1024.0);
  if (config.run.device == "cpu") {
    return make_cpu_backend(limit);
  }
  // Every rank hears of it when one has no GPU.
  const int local_rank = world.split_node()->rank();
  std::unique_ptr<Backend> backend;
  std::string error;
  try {
    backend = make_cuda_backend(
        local_rank,
        limit,
        config.run.kernels == "portable" ? Kernels::portable : Kernels::automatic);
  } catch (const Error& failure) {
    error = failure.what();
  }
  require_all(world, error);
  return backend;
}

}  // namespace

Session::Session(const RunConfig& config, std::unique_ptr<Communicator> world, Progress* progress)
    : dtype_(compute_type(config)),
      progress_(progress),
      host_world_(std::move(world)),
      backend_(open_backend(config, *host_world_)) {}

void fill_random(Stream& stream,
                 const Parameter& parameter,
                 std::uint64_t seed,
                 std::int64_t begin,
                 const TensorView& piece) {
  if (parameter.name.find("norm") != std::string::npos) {
    run(stream, Fill{.x = piece, .value = 1.0});
  } else if (parameter.name.ends_with(".bias")) {
    run(stream, Fill{.x = piece, .value = 0.0});
  } else {
    run(stream,
        FillNormal{.x = piece,
                   .seed = seed,
                   .stream = stream_of(parameter.name),
                   .begin = static_cast<std::uint64_t>(begin),
                   .deviation = 0.02});
  }
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
  Weights::Options options{placement.placement, context.dtype, placement.region, !placement.frozen};
  if (placement.frozen && reader && all_bfloat16(*reader, config)) {
    options.storage = DType::bf16;
  }
  const auto load_piece =
      [&](const Parameter& parameter, std::int64_t begin, const TensorView& piece) {
        const bool is_read = reader && reader->contains(parameter.name);
        if (!is_read && !parameter.is_new()) {
          fill_random(
              context.stream, parameter, static_cast<std::uint64_t>(run.run.seed), begin, piece);
          return;
        }
        fill_from_host(context, piece, [&](const TensorView& on_host) {
          if (is_read) {
            reader->read(parameter.name, begin, on_host);
          } else {
            fill_start_values(parameter, start_values(run.student), begin, on_host);
          }
        });
      };
  return {context, config, group, options, [&](Weights& weights) {
            weights.for_each_piece(load_piece);
            weights.round_masters();
          }};
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
  const Weights::Options options{
      placement.placement, context.dtype, placement.region, !placement.frozen};
  return {context, config, group, options, [&](Weights& weights) {
            HostImages images(context, weights.masters());
            load_checkpoint(*checkpoint, sharded_tensors(weights, images.images(), ""), group);
            images.upload();
            weights.round_masters();
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

DType declared_storage(const fs::path& directory, DType compute) {
  const std::string path = (directory / "config.json").string();
  const OrderedJson json = parse_json_object(read_file(path), path);
  const JsonFields fields(json, path);
  const std::string declared =
      fields.find_string("torch_dtype").value_or(fields.find_string("dtype").value_or(""));
  return declared == "bfloat16" ? DType::bf16 : compute;
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
