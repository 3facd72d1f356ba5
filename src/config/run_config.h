// Every setting of a run and its default. run_config.cpp binds each field to its key, range, unit
// and help (options.h); file, command line, --help and documentation derive from that table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bifocal {

// One training stage's schedule. Rates are per optimiser step, after linear warm-up.
struct StageConfig {
  std::int64_t steps = 0;
  double rate = 0.0;
  double final_rate = 0.0;  // where a cosine ends
  std::string schedule;     // "constant" or "cosine", after warm-up
  double warmup = 0.05;     // share of the steps
  double clip = 1.0;        // largest gradient norm; 0 for no clipping
};

struct RunConfig {
  struct Run {
    std::string directory;  // everything a run writes lies here
    std::int64_t seed = 0;
    std::string device = "cpu";       // cpu, or cuda: a GPU for each rank
    std::string dtype = "auto";       // compute type, see resolved_dtype()
    std::string kernels = "auto";     // of GPUs: auto, or portable ones alone
    std::int64_t log_every = 1;       // steps per line of metrics.jsonl and of plain console output
    std::int64_t max_skipped = 5;     // steps without an update in a row that end the run
    double peak_tflops = 0.0;         // of a rank's device, for MFU; 0: MFU is not shown
    double heartbeat_seconds = 50.0;  // without a sign of a rank that end the run; 0: not watched
    double progress_seconds = 600.0;  // without progress that end the run; 0: no limit
  } run;

  struct Teacher {
    std::string path;                // Hugging Face directory
    std::string placement = "auto";  // auto, look-ahead or ulysses
  } teacher;

  struct Student {
    std::string preset = "bifocal";
    std::int64_t budget = 576;        // cached tokens per layer, for the preset's window
    std::vector<std::string> mixers;  // per-layer overrides, see make_mixers
    std::string init;                 // Hugging Face directory to start from; empty: the teacher
    double sink_start = 0.0;
    double forget_bias_first = 3.0;  // f_gate bias, even steps over the states
    double forget_bias_last = 9.0;
    double output_bias = -1.0;  // o_gate bias
  } student;

  struct MeshAxes {
    std::int64_t data = 0;      // 0: ranks / sequence
    std::int64_t sequence = 1;  // ranks that share one row; 0: ranks / data
  } mesh;

  struct Data {
    std::vector<std::string> train;  // token shards or directories of them
    std::string mixture;             // or a file that names sources and weights
    std::int64_t row_tokens = 40960;
    std::int64_t rows_per_step = 8;
    std::int64_t seed = 0;
    std::string long_documents = "cut";  // documents longer than a row: cut or drop
    std::string keep = "all";            // all or assistant
  } data;

  StageConfig align{.steps = 2500, .rate = 1e-2, .final_rate = 1e-5, .schedule = "cosine"};

  struct AlignExtra {
    std::string trainable = "new";  // new or mixer
    std::string skipped = "drop";   // where align has nothing to train: drop its tokens, or spend
                                    // them in distill ("distill")
  } align_extra;

  StageConfig distill{.steps = 10000, .rate = 1e-5, .final_rate = 0.0, .schedule = "constant"};

  struct DistillExtra {
    double new_rate = 0.0;  // rate of new tensors; 0: the stage's rate
    double temperature = 1.0;
    double ce_weight = 0.0;  // s
  } distill_extra;

  StageConfig pretrain{.steps = 3000, .rate = 2e-3, .final_rate = 2e-5, .schedule = "cosine"};

  struct Optimizer {
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double decay = 0.1;               // on copied matrices, embedding and head
    std::string moments = "float32";  // float32, bfloat16 or host
  } optimizer;

  struct Memory {
    std::string recompute = "auto";     // auto, or a level: what the backward pass computes again
    std::int64_t kept_layers = 0;       // last layers that keep as much as the level before
    std::string weights = "replicate";  // student weights: replicate or shard
    std::int64_t logit_chunk = 0;       // tokens whose logits exist at once; 0: by device
    double limit_gib = 0.0;             // most tensor memory of a rank; 0: no limit
  } memory;

  struct Checkpoint {
    std::int64_t every = 0;       // steps; 0: at the end of each stage only
    std::int64_t keep = 2;        // newest ones kept; 0: all
    std::int64_t keep_every = 0;  // besides, those of steps that are multiples of it; 0: none
    bool stage_ends = true;       // whether the end of a stage writes one
    bool asynchronous = true;     // whether steps go on while one is written
  } checkpoint;

  struct Evaluate {
    std::int64_t rows = 8;   // held-out rows
    std::int64_t every = 0;  // training steps between validations; 0: never
    bool reach = false;
  } evaluate;
};

// The compute type by name: run.dtype, where "auto" is bfloat16 on GPUs and float32 on the CPU.
// Throws Error for a type that run.device does not compute in: CPUs have float32 and float64, GPUs
// bfloat16 and float32.
std::string resolved_dtype(const RunConfig& config);

// memory.logit_chunk, where 0 is 256 on the CPU and 1,536 on GPUs, whose products want more rows.
std::int64_t resolved_logit_chunk(const RunConfig& config);

}  // namespace bifocal
