// Decisions, counts and shares.
#include "plan/plan.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

void require_rows_for_ranks(const RunConfig& config, const MeshCounts& mesh) {
  BIFOCAL_REQUIRE(
      config.data.rows_per_step % mesh.data == 0,
      "[train] data.rows_per_step is {}, which {} data ranks cannot share evenly: set a "
      "multiple of {}, fewer ranks, or a larger mesh.sequence",
      config.data.rows_per_step,
      mesh.data,
      mesh.data);
  BIFOCAL_REQUIRE(
      config.data.row_tokens >= mesh.sequence,
      "[train] rows of {} tokens cannot be cut over {} sequence ranks: set data.row_tokens or "
      "mesh.sequence",
      config.data.row_tokens,
      mesh.sequence);
}

void require_rows_in_model(const RunConfig& config, const ModelConfig& model) {
  BIFOCAL_REQUIRE(config.data.row_tokens <= model.max_position,
                  "[data] data.row_tokens is {}, but the model takes at most {} positions: set "
                  "data.row_tokens to that or less",
                  config.data.row_tokens,
                  model.max_position);
}

PlacementChoice choose_placement(const RunConfig& config,
                                 const MeshCounts& mesh,
                                 const ModelConfig& teacher,
                                 std::int64_t align_steps) {
  const std::int64_t ranks = mesh.data * mesh.sequence;
  const std::int64_t rows = config.data.rows_per_step;
  const bool is_auto = config.teacher.placement == "auto";
  const bool align_needs_ulysses = align_steps > 0 && rows % ranks != 0;
  if (config.teacher.placement == "ulysses" || (is_auto && align_needs_ulysses)) {
    BIFOCAL_REQUIRE(
        teacher.kv_heads % mesh.sequence == 0,
        "[teacher] ulysses placement cuts the {} key-value heads over {} sequence ranks, which "
        "does not divide: set teacher.placement = \"look-ahead\" with data.rows_per_step a "
        "multiple of {} ranks, or another mesh.sequence",
        teacher.kv_heads,
        mesh.sequence,
        ranks);
    PlacementChoice choice{.work = TeacherPlacement::ulysses, .note = {}};
    if (is_auto) {
      choice.note = fmt::format(
          "teacher placement: ulysses, since align's {} rows a step do not divide by {} ranks",
          rows,
          ranks);
    }
    return choice;
  }
  BIFOCAL_REQUIRE(
      !align_needs_ulysses,
      "[teacher] look-ahead placement in align gives every rank whole rows: "
      "data.rows_per_step is {}, wanted a multiple of the {} ranks, or teacher.placement = "
      "\"ulysses\"",
      rows,
      ranks);
  return {};
}

bool same_attention(const ModelConfig& a, const ModelConfig& b) {
  return a.layers == b.layers && a.hidden == b.hidden && a.heads == b.heads &&
         a.head_dim == b.head_dim;
}

bool trains(StageKind stage, const RunConfig& config, const Parameter& parameter) {
  return stage != StageKind::align || parameter.is_new() ||
         (config.align_extra.trainable == "mixer" && parameter.in_mixer);
}

StageSteps choose_stages(const RunConfig& config,
                         const ModelConfig& student,
                         const ModelConfig& teacher) {
  BIFOCAL_REQUIRE(student.vocabulary == teacher.vocabulary,
                  "[train] the student has {} ids, the teacher {}: both must share one vocabulary",
                  student.vocabulary,
                  teacher.vocabulary);
  StageSteps steps{.align = config.align.steps, .distill = config.distill.steps, .note = {}};
  const ParameterTable table(student);
  const bool has_work = std::any_of(
      table.parameters().begin(), table.parameters().end(), [&](const Parameter& parameter) {
        return trains(StageKind::align, config, parameter);
      });
  if (steps.align > 0 && !has_work) {
    steps.note = "align: skipped, this student has no new tensor to train there";
    if (config.align_extra.skipped == "distill") {
      steps.distill += steps.align;
    }
    steps.align = 0;
  }
  BIFOCAL_REQUIRE(
      steps.align == 0 || same_attention(student, teacher),
      "[train] align compares attention heads layer by layer, which a student of another size "
      "than its teacher does not share: set align.steps = 0");
  return steps;
}

namespace {

std::string group_of(const Parameter& parameter) {
  const auto has = [&](const char* part) { return parameter.name.find(part) != std::string::npos; };
  if (has("mixer.")) {
    return has(".sink") ? "sinks" : (has("feature_") ? "features" : "gates");
  }
  if (has("embed_tokens")) {
    return "embedding";
  }
  if (has("lm_head")) {
    return "head";
  }
  if (has(".mlp.")) {
    return "MLP";
  }
  return has("norm") ? "norms" : "attention";
}

std::vector<ParameterGroup> group_parameters(const ParameterTable& table) {
  std::vector<ParameterGroup> groups;
  for (const Parameter& parameter : table.parameters()) {
    const std::string name = group_of(parameter);
    auto group = std::find_if(
        groups.begin(), groups.end(), [&](const ParameterGroup& g) { return g.name == name; });
    if (group == groups.end()) {
      group = groups.insert(groups.end(), ParameterGroup{.name = name});
    }
    (parameter.is_new() ? group->fresh : group->copied) += parameter.size();
  }
  return groups;
}

std::int64_t padded_size(const ParameterTable& table, std::int64_t ranks) {
  std::int64_t elements = 0;
  for (std::int64_t unit = 0; unit <= table.final_unit(); ++unit) {
    elements += padded_unit_size(table, unit, ranks);
  }
  return elements;
}

std::int64_t largest_unit(const ParameterTable& table, std::int64_t ranks) {
  std::int64_t elements = 0;
  for (std::int64_t unit = 0; unit <= table.final_unit(); ++unit) {
    elements = std::max(elements, padded_unit_size(table, unit, ranks));
  }
  return elements;
}

RankShare share_of(const Plan& plan, int rank) {
  const auto data = static_cast<int>(plan.mesh.data);
  const auto sequence = static_cast<int>(plan.mesh.sequence);
  RankShare share{.rank = rank,
                  .node = rank / plan.ranks_per_node,
                  .data_index = rank / sequence,
                  .sequence_index = rank % sequence};
  share.tokens = shard_range(plan.row_tokens, sequence, share.sequence_index);
  share.rows = shard_range(plan.rows_per_step, data, share.data_index);
  share.align_rows = share.rows;
  share.align_tokens = share.tokens;
  if (plan.placement.work == TeacherPlacement::look_ahead) {
    share.align_rows = shard_range(plan.rows_per_step, plan.ranks, rank);
    share.align_tokens = {0, plan.row_tokens};
  }
  return share;
}

// Of the rank that needs most, among ranks that between them have the longest shard, the longest
// halo and the most readers. On a node that the ranks do not fill, fewer ranks share the teacher.
StageMemory largest_memory(const PlanInputs& inputs,
                           const MeshCounts& mesh,
                           TeacherPlacement work,
                           StageKind stage,
                           const RecomputePlan& recompute) {
  const int sequence = static_cast<int>(mesh.sequence);
  const int node = std::min(inputs.ranks, inputs.ranks_per_node);
  const int last_node_ranks = (inputs.ranks - 1) % inputs.ranks_per_node + 1;
  StageMemory largest{.kind = stage, .recompute = recompute, .peak = {}, .rank = 0};
  for (const int rank : {0, 1, sequence / 2, sequence - 1, inputs.ranks - 1}) {
    if (rank >= inputs.ranks) {
      continue;
    }
    const bool on_last_node = rank + last_node_ranks >= inputs.ranks;
    const ForecastInputs forecast{.config = inputs.config,
                                  .student = inputs.student,
                                  .teacher = inputs.teacher ? &*inputs.teacher : nullptr,
                                  .mesh = mesh,
                                  .node_ranks = on_last_node ? last_node_ranks : node,
                                  .work = work,
                                  .teacher_storage = inputs.teacher_storage,
                                  .recompute = recompute};
    const PeakBytes memory = forecast_memory(forecast, stage, rank % sequence);
    if (memory.total > largest.peak.total) {
      largest.peak = memory;
      largest.rank = rank;
    }
  }
  return largest;
}

std::vector<PlannedStage> list_stages(const PlanInputs& inputs, const StageSteps& steps) {
  std::vector<PlannedStage> stages;
  const auto add = [&](StageKind kind, std::int64_t count) {
    if (count > 0) {
      stages.push_back({.kind = kind, .steps = count});
    }
  };
  if (inputs.teacher) {
    add(StageKind::align, steps.align);
    add(StageKind::distill, steps.distill);
  } else {
    add(StageKind::pretrain, inputs.config.pretrain.steps);
  }
  return stages;
}

void require_ranks(const PlanInputs& inputs) {
  BIFOCAL_REQUIRE(inputs.ranks > 0 && inputs.ranks_per_node > 0,
                  "[plan] wanted at least one rank and one rank a node, got {} and {}",
                  inputs.ranks,
                  inputs.ranks_per_node);
}

}  // namespace

double usable_bytes(const RunConfig& config) {
  const double share = config.run.device == "cuda" ? 0.97 : 1.0;
  return share * config.memory.limit_gib * 1024.0 * 1024.0 * 1024.0;
}

StageMemory plan_memory(const PlanInputs& inputs, StageKind stage) {
  const RunConfig& config = inputs.config;
  const MeshCounts mesh = resolve_mesh({config.mesh.data, config.mesh.sequence}, inputs.ranks);
  TeacherPlacement work = TeacherPlacement::look_ahead;
  if (inputs.teacher) {
    const StageSteps steps = choose_stages(config, inputs.student, *inputs.teacher);
    work = choose_placement(config, mesh, *inputs.teacher, steps.align).work;
  }
  const auto memory_of = [&](const RecomputePlan& recompute) {
    return largest_memory(inputs, mesh, work, stage, recompute);
  };
  if (config.memory.recompute != "auto") {
    return memory_of({recompute_named(config.memory.recompute), config.memory.kept_layers});
  }
  const double limit = usable_bytes(config);
  if (stage == StageKind::align || limit == 0.0) {
    return memory_of(Recompute::none);
  }
  const std::vector<RecomputePlan> plans = recompute_plans(inputs.student.layers);
  const auto fits = std::partition_point(plans.begin(), plans.end(), [&](const RecomputePlan& p) {
    return static_cast<double>(memory_of(p).peak.total) > limit;
  });
  return memory_of(fits == plans.end() ? plans.back() : *fits);
}

namespace {

// Tries changes of one configuration against its limit.
class Trials {
 public:
  Trials(const PlanInputs& inputs, StageKind stage) : inputs_(&inputs), stage_(stage) {}

  const PlanInputs& inputs() const { return *inputs_; }

  bool found() const { return !fits_.empty(); }

  const std::vector<std::string>& fits() const { return fits_; }

  // `changes` says what `changed` has that the configuration has not, but for recomputation, which
  // is auto in every trial. Whether it fits.
  bool fit(std::vector<std::string> changes, PlanInputs changed) {
    if (changed.config.memory.recompute != "auto") {
      changed.config.memory.recompute = "auto";
      changes.emplace_back("memory.recompute = \"auto\"");
    }
    if (changed.config.memory.kept_layers != 0) {
      changed.config.memory.kept_layers = 0;
      changes.emplace_back("memory.kept_layers = 0");
    }
    if (changes.empty()) {
      return false;  // the configuration as it is
    }
    const auto peak = static_cast<double>(plan_memory(changed, stage_).peak.total);
    if (peak > usable_bytes(changed.config)) {
      return false;
    }
    std::string text = changes.front();
    for (std::size_t i = 1; i < changes.size(); ++i) {
      text += ", " + changes[i];
    }
    fits_.push_back(fmt::format("{} ({})", text, format_bytes(peak)));
    return true;
  }

 private:
  const PlanInputs* inputs_;
  StageKind stage_;
  std::vector<std::string> fits_;
};

// Changes that hold together.
struct Changes {
  PlanInputs inputs;
  std::vector<std::string> texts;
};

// Each setting alone; returns those that agree with each other.
Changes try_settings(Trials& trials) {
  const PlanInputs& given = trials.inputs();
  const RunConfig& config = given.config;
  Changes all{.inputs = given, .texts = {}};
  const auto try_setting =
      [&](bool is_new, bool joins, const std::string& text, const auto& change) {
        if (!is_new) {
          return;
        }
        PlanInputs changed = given;
        change(changed.config);
        trials.fit({text}, changed);
        if (joins) {
          change(all.inputs.config);
          all.texts.push_back(text);
        }
      };
  trials.fit({}, given);
  try_setting(
      resolved_logit_chunk(config) > 512, true, "memory.logit_chunk = 512", [](RunConfig& changed) {
        changed.memory.logit_chunk = 512;
      });
  try_setting(given.ranks > 1 && config.memory.weights != "shard",
              true,
              "memory.weights = \"shard\"",
              [](RunConfig& changed) { changed.memory.weights = "shard"; });
  // Moments on the host take nothing of the device.
  const bool is_cuda = config.run.device == "cuda";
  try_setting(config.optimizer.moments == "float32",
              !is_cuda,
              "optimizer.moments = \"bfloat16\"",
              [](RunConfig& changed) { changed.optimizer.moments = "bfloat16"; });
  try_setting(is_cuda && config.optimizer.moments != "host",
              true,
              "optimizer.moments = \"host\"",
              [](RunConfig& changed) { changed.optimizer.moments = "host"; });
  return all;
}

// The fewest ranks that fit with `base`, in one group that shares each row. Whether any do.
bool try_ranks(Trials& trials, const Changes& base) {
  const PlanInputs& given = base.inputs;
  for (int ranks = 2 * given.ranks; ranks <= 64 && ranks <= 8 * given.ranks; ranks *= 2) {
    PlanInputs changed = given;
    changed.ranks = ranks;
    changed.ranks_per_node = std::min(ranks, std::max(8, given.ranks_per_node));
    changed.config.mesh = {.data = 1, .sequence = 0};
    std::vector<std::string> texts{fmt::format("{} ranks in one sequence group", ranks)};
    if (given.config.memory.weights != "shard") {
      changed.config.memory.weights = "shard";
      texts.emplace_back("memory.weights = \"shard\"");
    }
    if (given.config.teacher.placement != "auto") {
      changed.config.teacher.placement = "auto";
      texts.emplace_back("teacher.placement = \"auto\"");
    }
    texts.insert(texts.end(), base.texts.begin(), base.texts.end());
    try {
      if (trials.fit(texts, changed)) {
        return true;
      }
    } catch (const Error&) {  // a mesh that this run does not allow
    }
  }
  return false;
}

}  // namespace

std::vector<std::string> what_fits(const PlanInputs& inputs, StageKind stage) {
  Trials trials(inputs, stage);
  const Changes all = try_settings(trials);
  if (!trials.found() && all.texts.size() > 1) {
    trials.fit(all.texts, all.inputs);
  }
  if (!try_ranks(trials, {.inputs = inputs, .texts = {}}) && !trials.found()) {
    try_ranks(trials, all);
  }
  return trials.fits();
}

void require_memory(const PlanInputs& inputs, const StageMemory& memory, double share) {
  const double limit = usable_bytes(inputs.config);
  const auto peak = static_cast<double>(memory.peak.total);
  if (limit == 0.0 || share * peak <= limit) {
    return;
  }
  const std::vector<std::string> fits = what_fits(inputs, memory.kind);
  std::string advice = "nothing that plan tries fits: use a smaller model or shorter rows";
  if (!fits.empty()) {
    advice = "what fits:";
    for (const std::string& change : fits) {
      advice += "\n  " + change;
    }
  }
  fail("[plan] {} needs {} on rank {}, but {} leaves {} to tensors; {}",
       name_of(memory.kind),
       format_bytes(peak),
       memory.rank,
       inputs.limit_name,
       format_bytes(limit),
       advice);
}

std::vector<StageMemory> plan_stages(const PlanInputs& inputs) {
  StageSteps steps;
  if (inputs.teacher) {
    steps = choose_stages(inputs.config, inputs.student, *inputs.teacher);
  }
  std::vector<StageMemory> memories;
  for (const PlannedStage& stage : list_stages(inputs, steps)) {
    memories.push_back(plan_memory(inputs, stage.kind));
  }
  return memories;
}

Plan make_plan(const PlanInputs& inputs) {
  const RunConfig& config = inputs.config;
  require_ranks(inputs);
  Plan plan{.mesh = resolve_mesh({config.mesh.data, config.mesh.sequence}, inputs.ranks),
            .ranks = inputs.ranks,
            .ranks_per_node = std::min(inputs.ranks, inputs.ranks_per_node)};
  require_rows_for_ranks(config, plan.mesh);
  require_rows_in_model(config, inputs.teacher ? *inputs.teacher : inputs.student);
  StageSteps steps;
  if (inputs.teacher) {
    steps = choose_stages(config, inputs.student, *inputs.teacher);
    plan.placement = choose_placement(config, plan.mesh, *inputs.teacher, steps.align);
    plan.stages_note = steps.note;
  }
  plan.row_tokens = config.data.row_tokens;
  plan.rows_per_step = config.data.rows_per_step;

  const ParameterTable table(inputs.student);
  plan.groups = group_parameters(table);
  for (const ParameterGroup& group : plan.groups) {
    plan.copied_parameters += group.copied;
    plan.new_parameters += group.fresh;
  }
  const std::int64_t padded = padded_size(table, plan.ranks);
  plan.part_elements = padded / plan.ranks;
  plan.weight_elements = config.memory.weights == "shard" ? plan.part_elements : padded;
  if (inputs.teacher) {
    plan.teacher_part_elements =
        padded_size(ParameterTable(*inputs.teacher), plan.ranks_per_node) / plan.ranks_per_node;
  }
  if (plan.ranks > 1) {
    plan.reduction_bytes =
        largest_unit(table, plan.ranks) * static_cast<std::int64_t>(size_of(compute_type(config)));
  }
  if (inputs.teacher && config.evaluate.every > 0) {
    const ForecastInputs forecast{.config = config,
                                  .student = inputs.student,
                                  .teacher = &*inputs.teacher,
                                  .mesh = plan.mesh,
                                  .node_ranks = plan.ranks_per_node,
                                  .work = plan.placement.work,
                                  .teacher_storage = inputs.teacher_storage,
                                  .recompute = {}};
    plan.validation_bytes = forecast_validation(forecast, 0).total;
  }
  for (int rank = 0; rank < plan.ranks; ++rank) {
    plan.shares.push_back(share_of(plan, rank));
  }
  for (PlannedStage& stage : plan.stages = list_stages(inputs, steps)) {
    stage.tokens = stage.steps * plan.rows_per_step * plan.row_tokens;
    for (const Parameter& parameter : table.parameters()) {
      stage.trained += trains(stage.kind, config, parameter) ? parameter.size() : 0;
    }
    const StageMemory largest = plan_memory(inputs, stage.kind);
    stage.recompute = largest.recompute;
    stage.memory = largest.peak;
    stage.largest_rank = largest.rank;
    require_memory(inputs, largest);
  }
  return plan;
}

}  // namespace bifocal
