// `bifocal plan`: what train or pretrain would do on any number of ranks, without ranks and without
// data.
#include "plan/plan.h"

#include <filesystem>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/plan_times.h"
#include "cli/session.h"
#include "core/file.h"
#include "core/log.h"
#include "hf/hf_config.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kListedRanks = 32;  // the table's lines; JSON has every rank

struct PlanOptions {
  int ranks = 0;           // 0: what the mesh says
  int ranks_per_node = 0;  // 0: all
  bool is_pretrain = false;
  std::string json;
  TimeOptions times;
};

PlanInputs read_inputs(const RunConfig& config, const PlanOptions& options) {
  const auto mesh_ranks = static_cast<int>(config.mesh.data * config.mesh.sequence);
  const int ranks = options.ranks > 0 ? options.ranks : mesh_ranks;
  BIFOCAL_REQUIRE(ranks > 0,
                  "[plan] wanted --ranks: the configuration's mesh leaves the number of ranks open "
                  "(data {}, sequence {})",
                  config.mesh.data,
                  config.mesh.sequence);
  PlanInputs inputs{.config = config,
                    .ranks = ranks,
                    .ranks_per_node = options.ranks_per_node > 0 ? options.ranks_per_node : ranks};
  if (!options.is_pretrain) {
    BIFOCAL_REQUIRE(!config.teacher.path.empty(),
                    "[plan] wanted a teacher, got none: set teacher.path to a Hugging Face "
                    "directory, or plan the command pretrain with --pretrain");
    inputs.teacher = read_hf_config(config.teacher.path);
    inputs.teacher_storage = declared_storage(config.teacher.path, compute_type(config));
  }
  BIFOCAL_REQUIRE(!student_directory(config).empty(),
                  "[plan] wanted a model, got none: set student.init to a directory with "
                  "config.json");
  inputs.student = student_config(config);
  return inputs;
}

std::string bytes(std::int64_t count) {
  return format_bytes(static_cast<double>(count));
}

std::string range(const ShardRange& range) {
  return fmt::format("[{}, {})", format_count(range.begin), format_count(range.end));
}

std::string_view work_name(TeacherPlacement work) {
  return work == TeacherPlacement::look_ahead ? "look-ahead" : "ulysses";
}

std::string describe(const RecomputePlan& recompute) {
  return recompute.richer_layers == 0
             ? std::string(name_of(recompute.level))
             : fmt::format("{} - {} layers", name_of(recompute.level), recompute.richer_layers);
}

std::vector<Region> used_regions(const Plan& plan) {
  std::vector<Region> regions;
  for (std::size_t index = 0; index < static_cast<std::size_t>(Region::count); ++index) {
    const auto region = static_cast<Region>(index);
    for (const PlannedStage& stage : plan.stages) {
      if (stage.memory.of(region) > 0) {
        regions.push_back(region);
        break;
      }
    }
  }
  return regions;
}

void print_work(const PlanInputs& inputs, const Plan& plan) {
  fmt::print("{} rank(s), {} a node: data {} x sequence {}\n",
             plan.ranks,
             plan.ranks_per_node,
             plan.mesh.data,
             plan.mesh.sequence);
  fmt::print("A step: {} row(s) of {} tokens, {} for each data rank's group\n",
             format_count(plan.rows_per_step),
             format_count(plan.row_tokens),
             format_count(plan.rows_per_step / plan.mesh.data));
  if (inputs.teacher) {
    fmt::print("Teacher: {}, weights at rest in {}\n",
               work_name(plan.placement.work),
               name_of(inputs.teacher_storage));
  }
  for (const std::string& note : {plan.placement.note, plan.stages_note}) {
    if (!note.empty()) {
      fmt::print("  {}\n", note);
    }
  }
}

void print_parameters(const Plan& plan) {
  fmt::print("\n{:<18}{:>18}{:>18}\n", "parameters", "copied", "new");
  for (const ParameterGroup& group : plan.groups) {
    fmt::print("  {:<16}{:>18}{:>18}\n",
               group.name,
               format_count(group.copied),
               format_count(group.fresh));
  }
  fmt::print("  {:<16}{:>18}{:>18}   {} in all\n",
             "sum",
             format_count(plan.copied_parameters),
             format_count(plan.new_parameters),
             format_count(plan.copied_parameters + plan.new_parameters));
}

void print_stages(const Plan& plan) {
  fmt::print("\n{:<18}{:>18}{:>18}{:>18}\n", "stages", "steps", "tokens", "trained");
  for (const PlannedStage& stage : plan.stages) {
    fmt::print("  {:<16}{:>18}{:>18}{:>18}\n",
               name_of(stage.kind),
               format_count(stage.steps),
               format_count(stage.tokens),
               format_count(stage.trained));
  }
}

void print_memory(const Plan& plan) {
  fmt::print("\n{:<18}", "computed again");
  for (const PlannedStage& stage : plan.stages) {
    fmt::print("{:>18}", describe(stage.recompute));
  }
  fmt::print("\n{:<18}", "memory of a rank");
  for (const PlannedStage& stage : plan.stages) {
    fmt::print("{:>18}", name_of(stage.kind));
  }
  fmt::print("   (peaks, on the rank that needs most)\n");
  for (const Region region : used_regions(plan)) {
    fmt::print("  {:<16}", name_of(region));
    for (const PlannedStage& stage : plan.stages) {
      fmt::print("{:>18}", bytes(stage.memory.of(region)));
    }
    fmt::print("\n");
  }
  fmt::print("  {:<16}", "at once");
  for (const PlannedStage& stage : plan.stages) {
    fmt::print("{:>18}", bytes(stage.memory.total));
  }
  fmt::print("\n  {:<16}", "a node at most");
  for (const PlannedStage& stage : plan.stages) {
    fmt::print("{:>18}", bytes(stage.memory.total * plan.ranks_per_node));
  }
  fmt::print("\n");
  if (plan.validation_bytes > 0) {
    fmt::print("  Validation between steps, which is counted in these: {}\n",
               bytes(plan.validation_bytes));
  }
  if (plan.reduction_bytes > 0) {
    fmt::print("  MPI holds {} more on each rank while gradients are summed\n",
               bytes(plan.reduction_bytes));
  }
}

void print_shares(const PlanInputs& inputs, const Plan& plan) {
  fmt::print(
      "\nEvery rank holds 1/{} of each unit (embedding, layers, final): {} elements of\n"
      "gradients and of both moments; of the student's weights {}",
      plan.ranks,
      format_count(plan.part_elements),
      plan.weight_elements == plan.part_elements && plan.ranks > 1
          ? "as many, gathered a unit ahead"
          : fmt::format("all {}", format_count(plan.weight_elements)));
  if (inputs.teacher) {
    fmt::print("; of the teacher's {}{}",
               format_count(plan.teacher_part_elements),
               plan.ranks_per_node > 1 ? ", gathered in its node a unit ahead" : "");
  }
  fmt::print(".\n\n{:>6}{:>6}{:>6}{:>10}{:>20}{:>16}",
             "rank",
             "node",
             "data",
             "sequence",
             "tokens of a row",
             "rows of a step");
  const bool has_align = !plan.stages.empty() && plan.stages.front().kind == StageKind::align;
  fmt::print("{}\n", has_align ? "   in align" : "");
  for (const RankShare& share : plan.shares) {
    if (static_cast<std::size_t>(share.rank) == kListedRanks) {
      fmt::print("   ... {} more (--json lists all)\n", plan.shares.size() - kListedRanks);
      break;
    }
    fmt::print("{:>6}{:>6}{:>6}{:>10}{:>20}{:>16}",
               share.rank,
               share.node,
               share.data_index,
               share.sequence_index,
               range(share.tokens),
               range(share.rows));
    fmt::print("{}\n",
               has_align ? fmt::format("   tokens {} of rows {}",
                                       range(share.align_tokens),
                                       range(share.align_rows))
                         : "");
  }
}

Json range_json(const ShardRange& range) {
  return Json::array({range.begin, range.end});
}

Json stage_json(const PlannedStage& stage) {
  Json memory;
  for (std::size_t index = 0; index < static_cast<std::size_t>(Region::count); ++index) {
    const auto region = static_cast<Region>(index);
    memory[std::string(name_of(region))] = stage.memory.of(region);
  }
  return {{"name", name_of(stage.kind)},
          {"steps", stage.steps},
          {"tokens", stage.tokens},
          {"trained_parameters", stage.trained},
          {"largest_rank", stage.largest_rank},
          {"recompute", name_of(stage.recompute.level)},
          {"kept_layers", stage.recompute.richer_layers},
          {"peak_bytes", stage.memory.total},
          {"peak_bytes_by_region", memory}};
}

Json plan_json(const PlanInputs& inputs, const Plan& plan) {
  Json json{{"ranks", plan.ranks},
            {"ranks_per_node", plan.ranks_per_node},
            {"mesh", {{"data", plan.mesh.data}, {"sequence", plan.mesh.sequence}}},
            {"row_tokens", plan.row_tokens},
            {"rows_per_step", plan.rows_per_step},
            {"notes", Json::array()}};
  if (inputs.teacher) {
    json["teacher"] = {{"placement", work_name(plan.placement.work)},
                       {"storage", name_of(inputs.teacher_storage)},
                       {"part_elements", plan.teacher_part_elements}};
  }
  for (const std::string& note : {plan.placement.note, plan.stages_note}) {
    if (!note.empty()) {
      json["notes"].push_back(note);
    }
  }
  json["parameters"] = {{"copied", plan.copied_parameters}, {"new", plan.new_parameters}};
  for (const ParameterGroup& group : plan.groups) {
    json["parameters"]["groups"][group.name] = {{"copied", group.copied}, {"new", group.fresh}};
  }
  json["part_elements"] = plan.part_elements;
  json["weight_elements"] = plan.weight_elements;
  json["reduction_bytes"] = plan.reduction_bytes;
  json["validation_bytes"] = plan.validation_bytes;
  json["stages"] = Json::array();
  for (const PlannedStage& stage : plan.stages) {
    json["stages"].push_back(stage_json(stage));
  }
  json["shares"] = Json::array();
  for (const RankShare& share : plan.shares) {
    json["shares"].push_back({{"rank", share.rank},
                              {"node", share.node},
                              {"data_index", share.data_index},
                              {"sequence_index", share.sequence_index},
                              {"tokens", range_json(share.tokens)},
                              {"rows", range_json(share.rows)},
                              {"align_tokens", range_json(share.align_tokens)},
                              {"align_rows", range_json(share.align_rows)}});
  }
  return json;
}

void add_time_options(CLI::App& command, TimeOptions& times) {
  std::vector<std::string> names;
  for (const std::string_view name : gpu_names()) {
    names.emplace_back(name);
  }
  CLI::Option* gpu =
      command
          .add_option("--gpu", times.gpu, "GPU of each rank, for step times, days and GPU-hours")
          ->check(CLI::IsMember(names));
  command
      .add_option("--documents",
                  times.document_tokens,
                  "Times are for rows of documents of so many tokens (default: one document)")
      ->check(CLI::NonNegativeNumber)
      ->needs(gpu);
  command
      .add_option("--link",
                  times.link,
                  "GB/s that a GPU receives inside its host (default: what --gpu has)")
      ->check(CLI::PositiveNumber)
      ->needs(gpu);
  command
      .add_option(
          "--network",
          times.network,
          "GB/s that a GPU receives from other hosts (default: 50, a 400 Gb/s adapter each)")
      ->check(CLI::PositiveNumber)
      ->needs(gpu);
}

void run_plan(const RunConfig& config, const PlanOptions& options) {
  const PlanInputs inputs = read_inputs(config, options);
  const Plan plan = make_plan(inputs);
  const PlanTimes times(inputs, plan, options.times);
  print_work(inputs, plan);
  print_parameters(plan);
  print_stages(plan);
  print_memory(plan);
  print_shares(inputs, plan);
  times.print();
  if (!options.json.empty()) {
    Json json = plan_json(inputs, plan);
    json["times"] = times.json();
    write_file_atomically(options.json, json.dump(2) + "\n");
  }
}

}  // namespace

void add_plan_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "plan", "What a run would do and hold on any number of ranks; needs no data and no ranks");
  const auto options = std::make_shared<PlanOptions>();
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  command
      ->add_option(
          "--ranks", options->ranks, "Ranks of the run (default: mesh.data x mesh.sequence)")
      ->check(CLI::PositiveNumber);
  command->add_option("--ranks-per-node", options->ranks_per_node, "Ranks on a node (default: all)")
      ->check(CLI::PositiveNumber);
  command->add_flag(
      "--pretrain", options->is_pretrain, "Plan the command pretrain instead of train");
  command->add_option("--json", options->json, "File for the same as JSON");
  add_time_options(*command, options->times);
  command->callback([options, config, &context] {
    require_one_rank(context, "plan");
    run_plan(config->resolve(), *options);
  });
}

}  // namespace bifocal
