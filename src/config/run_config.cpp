// The table of every option: key, field, help, range, unit, words. Defaults stand in RunConfig.
#include "config/run_config.h"

#include "config/model_config.h"
#include "config/options.h"
#include "core/error.h"

namespace bifocal {

namespace {

template <class Section, class T>
AnyField at(Section RunConfig::*section, T Section::*field) {
  return Field<T>([=](RunConfig& config) -> T& { return config.*section.*field; });
}

constexpr ValueRange kNotNegative{.least = 0};
constexpr ValueRange kPositive{.least = 0, .excludes_least = true};
constexpr ValueRange kAtLeastOne{.least = 1};
constexpr ValueRange kShare{.least = 0, .most = 1};
constexpr ValueRange kBelowOne{.least = 0, .most = 1, .excludes_most = true};

std::vector<std::string> preset_words() {
  std::vector<std::string> words = preset_names();
  words.emplace_back(kKeepPreset);
  return words;
}

OptionSection run_section() {
  using Run = RunConfig::Run;
  const auto section = &RunConfig::run;
  return {"run",
          "The run as a whole",
          {
              {.key = "run.directory",
               .field = at(section, &Run::directory),
               .help = "where everything that the run writes is put"},
              {.key = "run.seed",
               .field = at(section, &Run::seed),
               .help = "seed of the student's new tensors",
               .range = kNotNegative},
              {.key = "run.device",
               .field = at(section, &Run::device),
               .help = "what ranks compute on: the CPU, or a GPU each",
               .words = {"cpu", "cuda"}},
              {.key = "run.dtype",
               .field = at(section, &Run::dtype),
               .help = "type that the ops compute in; auto: bfloat16 on GPUs (sums and master "
                       "weights in float32), else float32. float64 on CPUs alone",
               .words = {"auto", "float32", "float64", "bfloat16"}},
              {.key = "run.kernels",
               .field = at(section, &Run::kernels),
               .help = "GPU kernels: those made for the device where there are any, or the "
                       "portable ones alone",
               .words = {"auto", "portable"}},
              {.key = "run.log_every",
               .field = at(section, &Run::log_every),
               .help = "steps for each line of metrics.jsonl and of plain console output",
               .range = kAtLeastOne,
               .unit = "steps"},
              {.key = "run.max_skipped",
               .field = at(section, &Run::max_skipped),
               .help = "steps skipped in a row, for a loss or gradient that is not finite, that "
                       "end the run",
               .range = kAtLeastOne,
               .unit = "steps"},
              {.key = "run.peak_tflops",
               .field = at(section, &Run::peak_tflops),
               .help = "peak speed of a rank's device, of which MFU is a share; 0: no MFU",
               .range = kNotNegative,
               .unit = "TFLOP/s"},
              {.key = "run.heartbeat_seconds",
               .field = at(section, &Run::heartbeat_seconds),
               .help = "time without a sign of a rank that ends all; 0: ranks are not watched",
               .range = kNotNegative,
               .unit = "seconds"},
              {.key = "run.progress_seconds",
               .field = at(section, &Run::progress_seconds),
               .help = "time without progress of a rank that ends all, or 10 x the longest step "
                       "where that is more; 0: no limit",
               .range = kNotNegative,
               .unit = "seconds"},
          }};
}

OptionSection teacher_section() {
  using Teacher = RunConfig::Teacher;
  const auto section = &RunConfig::teacher;
  return {"teacher",
          "The frozen model that is distilled",
          {
              {.key = "teacher.path",
               .field = at(section, &Teacher::path),
               .help = "Hugging Face directory of the teacher"},
              {.key = "teacher.placement",
               .field = at(section, &Teacher::placement),
               .help = "look-ahead gives each rank whole rows, ulysses splits heads over ranks",
               .words = {"auto", "look-ahead", "ulysses"}},
          }};
}

OptionSection student_section() {
  using Student = RunConfig::Student;
  const auto section = &RunConfig::student;
  return {
      "student",
      "The student's mixers and how their new tensors start",
      {
          {.key = "student.preset",
           .field = at(section, &Student::preset),
           .help = "mixer of every layer; keep leaves those that student.init or the teacher has",
           .words = preset_words()},
          {.key = "student.budget",
           .field = at(section, &Student::budget),
           .help = "cache of a layer; the preset's window takes what its states leave",
           .range = kAtLeastOne,
           .unit = "cached tokens"},
          {.key = "student.mixers",
           .field = at(section, &Student::mixers),
           .help = "overrides of single layers, such as \"4-7:window=64,sink=learned\""},
          {.key = "student.init",
           .field = at(section, &Student::init),
           .help = "Hugging Face directory that the student starts from; empty: the teacher"},
          {.key = "student.sink_start",
           .field = at(section, &Student::sink_start),
           .help = "start value of the learned sink logits"},
          {.key = "student.forget_bias_first",
           .field = at(section, &Student::forget_bias_first),
           .help = "start value of the first state's forget bias; even steps lead to the last"},
          {.key = "student.forget_bias_last",
           .field = at(section, &Student::forget_bias_last),
           .help = "start value of the last state's forget bias"},
          {.key = "student.output_bias",
           .field = at(section, &Student::output_bias),
           .help = "start value of the bias of the gate between near and far branch"},
      }};
}

OptionSection mesh_section() {
  using MeshAxes = RunConfig::MeshAxes;
  const auto section = &RunConfig::mesh;
  return {"mesh",
          "How the ranks divide the work: data x sequence = number of ranks",
          {
              {.key = "mesh.data",
               .field = at(section, &MeshAxes::data),
               .help = "groups that each take their own rows; 0: what mesh.sequence leaves",
               .range = kNotNegative,
               .unit = "groups"},
              {.key = "mesh.sequence",
               .field = at(section, &MeshAxes::sequence),
               .help = "ranks that share one row; 0: what mesh.data leaves",
               .range = kNotNegative,
               .unit = "ranks"},
          }};
}

OptionSection data_section() {
  using Data = RunConfig::Data;
  const auto section = &RunConfig::data;
  return {"data",
          "The token shards and how they are packed into rows",
          {
              {.key = "data.train",
               .field = at(section, &Data::train),
               .help = "token shards, or directories of them"},
              {.key = "data.mixture",
               .field = at(section, &Data::mixture),
               .help = "instead of data.train: a file of weighted sources (data/README.md)"},
              {.key = "data.row_tokens",
               .field = at(section, &Data::row_tokens),
               .help = "length of a packed row",
               .range = kAtLeastOne,
               .unit = "tokens"},
              {.key = "data.rows_per_step",
               .field = at(section, &Data::rows_per_step),
               .help = "rows of one optimiser step, over all ranks",
               .range = kAtLeastOne,
               .unit = "rows"},
              {.key = "data.seed",
               .field = at(section, &Data::seed),
               .help = "seed of the order of the documents",
               .range = kNotNegative},
              {.key = "data.long",
               .field = at(section, &Data::long_documents),
               .help = "documents longer than a row: cut into rows and a rest, or kept out",
               .words = {"cut", "drop"}},
              {.key = "data.keep",
               .field = at(section, &Data::keep),
               .help = "positions that count in the loss: all, or those that predict the "
                       "assistant's tokens",
               .words = {"all", "assistant"}},
          }};
}

// The options that every stage has.
std::vector<Option> stage_options(const std::string& name, StageConfig RunConfig::*stage) {
  return {
      {.key = name + ".steps",
       .field = at(stage, &StageConfig::steps),
       .help = "optimiser steps; 0 leaves the stage out",
       .range = kNotNegative,
       .unit = "steps"},
      {.key = name + ".rate",
       .field = at(stage, &StageConfig::rate),
       .help = "learning rate after warm-up",
       .range = kPositive},
      {.key = name + ".final_rate",
       .field = at(stage, &StageConfig::final_rate),
       .help = "learning rate that a cosine schedule ends at",
       .range = kNotNegative},
      {.key = name + ".schedule",
       .field = at(stage, &StageConfig::schedule),
       .help = "course of the learning rate after warm-up",
       .words = {"constant", "cosine"}},
      {.key = name + ".warmup",
       .field = at(stage, &StageConfig::warmup),
       .help = "share of the steps in which the rate rises linearly",
       .range = kShare},
      {.key = name + ".clip",
       .field = at(stage, &StageConfig::clip),
       .help = "largest gradient norm; 0: no clipping",
       .range = kNotNegative},
  };
}

OptionSection align_section() {
  using AlignExtra = RunConfig::AlignExtra;
  const auto section = &RunConfig::align_extra;
  std::vector<Option> options = stage_options("align", &RunConfig::align);
  options.push_back({.key = "align.trainable",
                     .field = at(section, &AlignExtra::trainable),
                     .help = "the student's new tensors, or the whole mixer (also q, k, v)",
                     .words = {"new", "mixer"}});
  options.push_back({.key = "align.skipped",
                     .field = at(section, &AlignExtra::skipped),
                     .help =
                         "where nothing is trainable: drop the stage's tokens, or spend them in "
                         "distill",
                     .words = {"drop", "distill"}});
  return {"align", "Stage 1: each mixer learns its teacher layer's attention output", options};
}

OptionSection distill_section() {
  using DistillExtra = RunConfig::DistillExtra;
  const auto section = &RunConfig::distill_extra;
  std::vector<Option> options = stage_options("distill", &RunConfig::distill);
  options.push_back({.key = "distill.new_rate",
                     .field = at(section, &DistillExtra::new_rate),
                     .help = "learning rate of new tensors, scheduled alike; 0: distill.rate",
                     .range = kNotNegative});
  options.push_back({.key = "distill.temperature",
                     .field = at(section, &DistillExtra::temperature),
                     .help = "temperature of both distributions in the KL term",
                     .range = kPositive});
  options.push_back({.key = "distill.ce_weight",
                     .field = at(section, &DistillExtra::ce_weight),
                     .help = "weight of next-token cross-entropy; the KL term has the rest",
                     .range = kShare});
  return {"distill", "Stage 2: the student learns the teacher's distribution", options};
}

OptionSection pretrain_section() {
  return {"pretrain",
          "Next-token training, for the command pretrain. The mixers are student.preset's: keep "
          "trains the model of student.init as it is",
          stage_options("pretrain", &RunConfig::pretrain)};
}

OptionSection optimizer_section() {
  using Optimizer = RunConfig::Optimizer;
  const auto section = &RunConfig::optimizer;
  return {"optimizer",
          "AdamW",
          {
              {.key = "optimizer.beta1",
               .field = at(section, &Optimizer::beta1),
               .help = "decay of the first moment",
               .range = kBelowOne},
              {.key = "optimizer.beta2",
               .field = at(section, &Optimizer::beta2),
               .help = "decay of the second moment",
               .range = kBelowOne},
              {.key = "optimizer.eps",
               .field = at(section, &Optimizer::eps),
               .help = "added to the root of the second moment",
               .range = kPositive},
              {.key = "optimizer.decay",
               .field = at(section, &Optimizer::decay),
               .help = "weight decay of copied matrices, embedding and head; never in align",
               .range = kNotNegative},
              {.key = "optimizer.moments",
               .field = at(section, &Optimizer::moments),
               .help = "moments: float32 (float64 with run.dtype), bfloat16, or as float32 in the "
                       "host's memory",
               .words = {"float32", "bfloat16", "host"}},
          }};
}

OptionSection memory_section() {
  using Memory = RunConfig::Memory;
  const auto section = &RunConfig::memory;
  return {
      "memory",
      "What is kept and what is computed or gathered again",
      {
          {.key = "memory.recompute",
           .field = at(section, &Memory::recompute),
           .help = "what the backward pass computes again, from nothing to each block; auto: as "
                   "little as memory.limit_gib allows, and in train what the GPU has free",
           .words = {"auto", "none", "light", "mlp", "mixer", "block"}},
          {.key = "memory.kept_layers",
           .field = at(section, &Memory::kept_layers),
           .help = "last layers that keep as much as the level before memory.recompute's; not "
                   "with auto or none",
           .range = kNotNegative,
           .unit = "layers"},
          {.key = "memory.weights",
           .field = at(section, &Memory::weights),
           .help = "student weights: whole on every rank, or sharded and gathered by layer",
           .words = {"replicate", "shard"}},
          {.key = "memory.logit_chunk",
           .field = at(section, &Memory::logit_chunk),
           .help = "tokens whose logits exist at once; 0: 256 on the CPU, 1536 on GPUs",
           .range = kNotNegative,
           .unit = "tokens"},
          {.key = "memory.limit_gib",
           .field = at(section, &Memory::limit_gib),
           .help = "most tensor memory of a rank; 0: no limit",
           .range = kNotNegative,
           .unit = "GiB"},
      }};
}

OptionSection checkpoint_section() {
  using Checkpoint = RunConfig::Checkpoint;
  const auto section = &RunConfig::checkpoint;
  return {"checkpoint",
          "When the run's state is saved",
          {
              {.key = "checkpoint.every",
               .field = at(section, &Checkpoint::every),
               .help = "steps between checkpoints; 0: none inside a stage",
               .range = kNotNegative,
               .unit = "steps"},
              {.key = "checkpoint.keep",
               .field = at(section, &Checkpoint::keep),
               .help = "newest checkpoints that are kept; 0: all",
               .range = kNotNegative,
               .unit = "checkpoints"},
              {.key = "checkpoint.keep_every",
               .field = at(section, &Checkpoint::keep_every),
               .help = "checkpoints of steps that are multiples of it are kept besides; 0: none",
               .range = kNotNegative,
               .unit = "steps"},
              {.key = "checkpoint.stage_ends",
               .field = at(section, &Checkpoint::stage_ends),
               .help = "write one at the end of each stage; without it and checkpoint.every a run "
                       "is a trial that leaves metrics alone"},
              {.key = "checkpoint.asynchronous",
               .field = at(section, &Checkpoint::asynchronous),
               .help = "with checkpoint.every: steps go on while a thread writes a copy of the "
                       "state, which takes as much host memory; false: they wait, without a copy"},
          }};
}

OptionSection evaluate_section() {
  using Evaluate = RunConfig::Evaluate;
  const auto section = &RunConfig::evaluate;
  return {"evaluate",
          "What the command evaluate measures, and train while it runs",
          {
              {.key = "evaluate.rows",
               .field = at(section, &Evaluate::rows),
               .help = "rows of held-out documents",
               .range = kAtLeastOne,
               .unit = "rows"},
              {.key = "evaluate.every",
               .field = at(section, &Evaluate::every),
               .help = "steps between validations of train, on evaluate.rows whole rows that the "
                       "ranks share out; 0: none",
               .range = kNotNegative,
               .unit = "steps"},
              {.key = "evaluate.reach",
               .field = at(section, &Evaluate::reach),
               .help = "also measure how far back a changed token is noticed"},
          }};
}

}  // namespace

const std::vector<OptionSection>& option_sections() {
  static const std::vector<OptionSection> sections = {run_section(),
                                                      teacher_section(),
                                                      student_section(),
                                                      mesh_section(),
                                                      data_section(),
                                                      align_section(),
                                                      distill_section(),
                                                      pretrain_section(),
                                                      optimizer_section(),
                                                      memory_section(),
                                                      checkpoint_section(),
                                                      evaluate_section()};
  return sections;
}

std::string resolved_dtype(const RunConfig& config) {
  const bool on_gpu = config.run.device == "cuda";
  const std::string& dtype = config.run.dtype;
  if (dtype == "auto") {
    return on_gpu ? "bfloat16" : "float32";
  }
  BIFOCAL_REQUIRE(!on_gpu || dtype != "float64",
                  "[config] wanted run.dtype bfloat16 or float32 with run.device = \"cuda\", got "
                  "float64: set another type, or run.device = \"cpu\"");
  BIFOCAL_REQUIRE(on_gpu || dtype != "bfloat16",
                  "[config] wanted run.dtype float32 or float64 with run.device = \"cpu\", got "
                  "bfloat16: set another type, or run.device = \"cuda\"");
  return dtype;
}

std::int64_t resolved_logit_chunk(const RunConfig& config) {
  if (config.memory.logit_chunk > 0) {
    return config.memory.logit_chunk;
  }
  return config.run.device == "cuda" ? 1536 : 256;
}

}  // namespace bifocal
