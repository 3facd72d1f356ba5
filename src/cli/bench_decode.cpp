// `bifocal bench decode`: how long a prompt takes, and tokens a second after it, for prompts of
// several lengths.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/bench.h"
#include "cli/bench_command.h"
#include "cli/config_options.h"
#include "cli/session.h"
#include "core/log.h"
#include "generate/generator.h"
#include "plan/cache_memory.h"
#include "plan/parameter_table.h"

namespace bifocal {

namespace {

struct DecodeOptions {
  BenchSettings settings;
  std::string model = "qwen3.5-4b";
  std::vector<std::string> students = {"bifocal", "swa_learned_sink"};
  std::vector<std::int64_t> prompts = {1024, 8192, 32768, 131072};
  std::int64_t tokens = 128;
  std::int64_t batch = 1;
  std::int64_t chunk = 16384;
};

// Seconds of prompt and of a token after it, for every repetition.
struct DecodeTimes {
  std::vector<double> prompt, token;
};

DecodeTimes time_answers(Context context,
                         Generator& generator,
                         const DecodeOptions& options,
                         std::int64_t length) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  };
  std::vector<GenerateRequest> requests(static_cast<std::size_t>(options.batch));
  for (std::size_t i = 0; i < requests.size(); ++i) {
    requests[i].prompt = random_bench_row({length}, generator.config().vocabulary, i).ids;
  }
  const std::int64_t unsettled = std::min<std::int64_t>(8, options.tokens / 2);
  DecodeTimes times;
  const std::int64_t runs = options.settings.warmups + options.settings.repeats;
  for (std::int64_t run = 0; run < runs; ++run) {
    // Prompts are read one after another and give a token each before all answers grow together.
    // The first steps of those set things up.
    const auto begin = Clock::now();
    Clock::time_point read;
    Clock::time_point settled;
    Clock::time_point last;
    std::int64_t arrived = 0;
    GenerateEvents events;
    events.on_token = [&](std::int64_t, std::int32_t) {
      last = Clock::now();
      ++arrived;
      if (arrived == options.batch) {
        read = last;
      }
      if (arrived == options.batch * (1 + unsettled)) {
        settled = last;
      }
    };
    generate(context,
             generator,
             requests,
             {.max_new_tokens = options.tokens + 1, .prefill_chunk = options.chunk},
             events);
    if (run < options.settings.warmups) {
      continue;
    }
    times.prompt.push_back(seconds(begin, read));
    times.token.push_back(seconds(settled, last) / static_cast<double>(options.tokens - unsettled));
  }
  return times;
}

// Bytes that one token reads: every matrix, and the caches; states are written again.
double token_bytes(const ModelConfig& model, DType type, std::int64_t context, std::int64_t batch) {
  const auto element = static_cast<double>(size_of(type));
  const ParameterTable table(model);
  double weights = static_cast<double>(table.total());
  if (!model.tied) {
    weights -= static_cast<double>(model.vocabulary * model.hidden);  // the embedding: a row of it
  }
  double states = 0.0;
  for (const MixerSettings& mixer : model.mixers) {
    states += static_cast<double>(mixer.num_states(model.heads, model.kv_heads) * model.head_dim *
                                  model.head_dim) *
              4.0;
  }
  // sequence_cache_bytes counts bf16 keys and values, float32 states.
  const double cache =
      (sequence_cache_bytes(model, context) - states) * element / 2.0 + 2.0 * states;
  return weights * element + static_cast<double>(batch) * cache;
}

void bench_decode(const RunConfig& config, const DecodeOptions& options) {
  BenchReport report(options.settings, "bench decode", true);
  Session session(config, make_self_communicator());
  const std::unique_ptr<Communicator> self = session.take_world();
  const Context context = session.context();
  const ModelConfig teacher = bench_model(options.model);
  std::map<std::pair<std::string, std::int64_t>, double> prompt_seconds;
  for (const std::string& name : options.students) {
    ModelConfig model = teacher;
    const std::string preset = name == "teacher" ? std::string(kKeepPreset) : name;
    model.mixers = make_mixers(preset, config.student.budget, config.student.mixers, teacher);
    report.note(fmt::format("{} {}: {} ({})",
                            options.model,
                            name,
                            describe(model.mixers.front()),
                            name_of(context.dtype)));
    LoadedModel loaded = load_model(
        context, model, {}, *self, {Weights::Placement::sharded, Region::weights, true}, config);
    Generator generator(context, loaded.decoder(), options.batch);
    for (const std::int64_t length : options.prompts) {
      const DecodeTimes times = time_answers(context, generator, options, length);
      const std::string suffix =
          fmt::format("{}_{}_{}{}",
                      model_label(options.model),
                      student_label(preset),
                      length_label(length),
                      options.batch > 1 ? fmt::format("_batch_{}", options.batch) : "");
      const double token = median(times.token);
      const auto [least, most] = std::ranges::minmax(times.token);
      const auto batch = static_cast<double>(options.batch);
      const double floor =
          token_bytes(model, context.dtype, length, options.batch) / options.settings.rates().bytes;
      report.add({.name = "decode_" + suffix,
                  .unit = "tokens/s",
                  .ours = batch / token,
                  .low = batch / most,
                  .high = batch / least,
                  .samples = static_cast<std::int64_t>(times.token.size()),
                  .floor = batch / floor});
      report.add(time_row("prefill_" + suffix, "s", times.prompt));
      prompt_seconds[{name, length}] = median(times.prompt);
    }
  }
  for (const std::int64_t length : options.prompts) {
    const auto bifocal = prompt_seconds.find({"bifocal", length});
    const auto window = prompt_seconds.find({"swa_learned_sink", length});
    if (bifocal == prompt_seconds.end() || window == prompt_seconds.end()) {
      continue;
    }
    const double ratio = window->second / bifocal->second;
    std::vector<std::string> names{model_label(options.model) + "_" + length_label(length)};
    if (options.model == "qwen3.5-4b") {  // the shape that results pages compare
      names.push_back(length_label(length));
    }
    for (const std::string& name : names) {
      report.add({.name = "prefill_ratio_" + name,
                  .unit = "share",
                  .ours = ratio,
                  .low = ratio,
                  .high = ratio});
    }
  }
}

}  // namespace

void add_bench_decode_command(CLI::App& bench, const CommandContext& context) {
  CLI::App* command = bench.add_subcommand(
      "decode", "Prompts and tokens a second of students and teacher, weights random");
  auto options = std::make_shared<DecodeOptions>();
  options->settings.warmups = 1;
  options->settings.repeats = 3;
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*command);
  command
      ->add_option("--model",
                   options->model,
                   "Shape: qwen3-4b, qwen3.5-4b, tiny, or the path of a config.json")
      ->capture_default_str();
  command->add_option("--student", options->students, "Presets, or teacher for full attention")
      ->capture_default_str();
  command->add_option("--prompt", options->prompts, "Tokens of the prompts")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--tokens", options->tokens, "Tokens that are drawn after each prompt")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--batch", options->batch, "Sequences that advance together")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--prompt-chunk", options->chunk, "Tokens of a prompt that are read at once")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  options->settings.add_to(*command);
  command->callback([options, config, &context] {
    require_one_rank(context, "bench decode");
    bench_decode(config->resolve(), *options);
  });
}

}  // namespace bifocal
