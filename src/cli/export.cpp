// `bifocal export`: a trained student, or an untrained one, as a Hugging Face directory.
#include "hf/export.h"

#include <memory>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "checkpoint/checkpoint.h"
#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "config/read.h"
#include "core/error.h"
#include "core/memory.h"
#include "hf/hf_config.h"
#include "hf/model_tensors.h"
#include "plan/start_values.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

struct ExportCommand {
  std::string source;  // run directory or checkpoint; empty: the configuration's teacher and preset
  std::string output;
  std::string dtype = "bfloat16";
  std::uint64_t shard_bytes = ExportOptions{}.shard_bytes;
};

// What the model card names: a model that was pretrained here has no teacher but its own directory.
fs::path teacher_directory(const RunConfig& config) {
  return config.teacher.path.empty() ? student_directory(config) : fs::path(config.teacher.path);
}

void export_checkpoint(const ExportCommand& command,
                       const RunConfig& given,
                       ExportOptions options) {
  const std::optional<fs::path> found = find_checkpoint(command.source);
  BIFOCAL_REQUIRE(found.has_value(),
                  "[export] {} holds no checkpoint: give a run or one of its checkpoints",
                  command.source);
  const fs::path& checkpoint = *found;
  const CheckpointInfo info = read_checkpoint_info(checkpoint);
  RunConfig config = parse_run_config(info.configuration, checkpoint.string());
  if (!given.teacher.path.empty()) {
    config.teacher.path = given.teacher.path;
  }
  if (!given.student.init.empty()) {
    config.student.init = given.student.init;
  }
  options.model = parse_hf_config(info.model_config, checkpoint.string());
  options.tokenizer = student_directory(config);
  options.teacher = teacher_directory(config);
  options.origin = fmt::format("trained, {} optimiser steps", info.step);
  options.configuration = info.configuration;

  Memory memory;
  const ParameterTable table(options.model);
  std::vector<Tensor> tensors;
  std::vector<ShardedTensor> shards;
  std::map<std::string, ConstTensorView> views;
  for (const Parameter& parameter : table.parameters()) {
    tensors.push_back(memory.empty(Region::weights, DType::f32, parameter.shape));
    const TensorView view = tensors.back().view();
    shards.push_back(
        {parameter.name, parameter.shape, 0, parameter.size(), view.reshape({parameter.size()})});
    views.emplace(parameter.name, view);
  }
  const std::unique_ptr<Communicator> self = make_self_communicator();
  load_checkpoint(checkpoint, shards, *self);
  export_model(options, [&](const Parameter& parameter) { return views.at(parameter.name); });
}

// The start of a student: what its directory holds, new tensors at their start values.
void export_untrained(const RunConfig& config, ExportOptions options) {
  options.model = student_config(config);
  options.tokenizer = student_directory(config);
  options.teacher = teacher_directory(config);
  options.origin = "untrained: the base model's, with new tensors at their start values";
  const SafetensorsReader reader(options.tokenizer);
  check_model_tensors(reader, ParameterTable(read_hf_config(options.tokenizer)));
  const StartValues start = start_values(config.student);
  std::vector<float> elements;
  export_model(options, [&](const Parameter& parameter) -> ConstTensorView {
    elements.resize(static_cast<std::size_t>(parameter.size()));
    const TensorView view{elements.data(), DType::f32, parameter.shape};
    if (parameter.is_new() && !reader.contains(parameter.name)) {
      fill_start_values(parameter, start, 0, view);
    } else {
      reader.read(parameter.name, 0, view);
    }
    return view;
  });
}

void run_export(const ExportCommand& command, const RunConfig& config) {
  ExportOptions options;
  options.output = command.output;
  options.dtype = command.dtype == "float32" ? DType::f32 : DType::bf16;
  options.shard_bytes = command.shard_bytes;
  options.commit = BIFOCAL_COMMIT;
  if (!command.source.empty()) {
    export_checkpoint(command, config, std::move(options));
  } else {
    BIFOCAL_REQUIRE(!config.teacher.path.empty() || !config.student.init.empty(),
                    "[export] nothing to export: give a run directory, or teacher.path and "
                    "student.preset for an untrained student");
    export_untrained(config, std::move(options));
  }
  fmt::print("Wrote {}\n", command.output);
}

}  // namespace

void add_export_command(CLI::App& app, const CommandContext& context) {
  auto command = std::make_shared<ExportCommand>();
  CLI::App* added = app.add_subcommand("export", "Write a student as a Hugging Face directory");
  added->add_option("source",
                    command->source,
                    "Run directory or checkpoint (default: teacher.path with student.preset, "
                    "untrained)");
  added->add_option("--output", command->output, "Directory to write, absent or empty")->required();
  added->add_option("--dtype", command->dtype, "Type of the weights: bfloat16 or float32")
      ->check(CLI::IsMember({"bfloat16", "float32"}))
      ->capture_default_str();
  added->add_option("--shard-bytes", command->shard_bytes, "Most bytes of tensors in a weight file")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  auto options = ConfigOptions::add_to(*added);
  added->callback([command, options, &context] {
    require_one_rank(context, "export");
    run_export(*command, options->resolve());
  });
}

}  // namespace bifocal
