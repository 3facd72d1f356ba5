// `bifocal rollouts`: sampled answers to a file of problems, over ranks and restarts.
#include "evaluate/rollouts.h"

#include <algorithm>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/config_options.h"
#include "cli/generate_command.h"
#include "core/sha256.h"

namespace bifocal {

namespace {

struct RolloutsCommand {
  GenerateCommand generate;  // input: the problems; output: the run directory
};

// What the model computes: mixers, names and values of all parameters, and the rest of its
// config.json. Untrained models have one as well.
std::string model_hash(LoadedModel& model) {
  Sha256 hash;
  const auto add = [&](const std::string& text) { hash.add(text.c_str(), text.size() + 1); };
  add(model.config().source_json);
  for (const MixerSettings& mixer : model.config().mixers) {
    add(describe(mixer));
  }
  for (std::size_t unit = 0; unit < model.table().units().size(); ++unit) {
    const ConstTensorView whole = model.weights().whole(static_cast<std::int64_t>(unit));
    hash.add(whole.data, static_cast<std::size_t>(whole.size()) * size_of(whole.dtype));
  }
  return hash.hex();
}

nlohmann::ordered_json settings_of(const RolloutsCommand& command,
                                   const RunConfig& run,
                                   const ModelFiles& files,
                                   const ProblemSet& problems,
                                   const GenerateOptions& sampling,
                                   LoadedModel& model) {
  const GenerateCommand& generate = command.generate;
  return {{"model_sha256", model_hash(model)},
          {"tokenizer_sha256", files.has_tokenizer() ? files.tokenizer().hash() : ""},
          {"chat_template", files.has_chat_template() ? files.chat_template().name() : ""},
          {"system", generate.system},
          {"problems_sha256", problems.hash()},
          {"samples", command.generate.samples},
          {"max_new_tokens", sampling.max_new_tokens},
          {"temperature", sampling.temperature},
          {"top_k", sampling.top_k},
          {"top_p", sampling.top_p},
          {"seed", sampling.seed},
          {"stop_ids", sampling.stop_ids},
          {"dtype", resolved_dtype(run)},
          {"prefill_chunk", sampling.prefill_chunk}};
}

Rollout rollout_of(const GeneratedAnswer& answer, const ModelFiles& files) {
  Rollout rollout{.ids = answer.ids,
                  .tokens = static_cast<std::int64_t>(answer.ids.size()),
                  .stopped = answer.stopped};
  if (files.has_tokenizer()) {
    rollout.text = text_of(answer, files.tokenizer());
  }
  return rollout;
}

void run_rollouts(const RolloutsCommand& command,
                  const RunConfig& run,
                  const CommandContext& program) {
  GenerateCommand options = command.generate;
  resolve_prefill_chunk(options, run);
  Session session(run, watched_world(program, run));
  const std::unique_ptr<Communicator> world = session.take_world();
  const std::unique_ptr<Communicator> self = world->split(world->rank());
  const ProblemSet problems = ProblemSet::read(options.input);
  const Context context = session.context();
  // In parts over one rank: weights then keep the type they are stored in.
  const ModelPlacement placement{Weights::Placement::sharded, Region::weights, true};
  LoadedModel model = open_student(context, run, options.model, *self, placement);
  const ModelFiles files(options, run);
  const std::vector<Prompt> prompts = read_prompts(options, files, model.config().vocabulary);
  BIFOCAL_ASSERT(prompts.size() == problems.problems().size());
  const GenerateOptions sampling = generate_options(
      options, files, model.config(), std::ranges::any_of(prompts, &Prompt::is_chat));

  nlohmann::ordered_json settings;
  if (world->rank() == 0) {
    settings = settings_of(command, run, files, problems, sampling, model);
  }
  RolloutDirectory directory(
      *world,
      options.output,
      problems,
      command.generate.samples,
      settings,
      {{"commit", BIFOCAL_COMMIT},
       {"model", options.model.empty() ? "untrained " + run.student.preset : options.model},
       {"problems", options.input}});
  Console console(world->rank() == 0);
  if (directory.has_other_commits()) {
    console.print("[rollouts] another commit of the program drew a part of these samples");
  }
  const Stopwatch watch;
  const auto rate = [&](std::int64_t tokens) {
    return format_tokens_per_second(static_cast<double>(tokens) / watch.seconds());
  };
  const Answerer answer = [&](std::span<const RolloutTask> tasks, const auto& finished) {
    std::vector<GenerateRequest> requests;
    for (const RolloutTask& task : tasks) {
      requests.push_back({prompts[static_cast<std::size_t>(task.problem)].ids, task.stream()});
    }
    const auto most = static_cast<std::int64_t>(requests.size());
    Generator generator(context, model.decoder(), std::min(options.batch, most));
    generate(context,
             generator,
             requests,
             sampling,
             {.on_finish = [&](std::int64_t request, const GeneratedAnswer& got) {
               finished(static_cast<std::size_t>(request), rollout_of(got, files));
             }});
  };
  const RolloutReport report = draw_rollouts(
      *world,
      directory,
      problems,
      command.generate.samples,
      answer,
      [&](std::int64_t drawn, std::int64_t of, std::int64_t tokens) {
        console.live(fmt::format("rank 0: {}/{} samples  {}", drawn, of, rate(tokens)));
      });
  console.end_live();
  console.print(fmt::format("{} samples in {}/rollouts.jsonl; drawn now: {}, {} tokens, {}",
                            format_count(report.samples),
                            options.output,
                            format_count(report.drawn),
                            format_count(report.tokens),
                            rate(report.tokens)));
}

}  // namespace

void add_rollouts_command(CLI::App& app, const CommandContext& context) {
  CLI::App* added = app.add_subcommand(
      "rollouts",
      "Draw samples of answers to a file of problems on any number of ranks; the same command goes "
      "on after a kill, and the samples are the same");
  const std::shared_ptr<ConfigOptions> config = ConfigOptions::add_to(*added);
  const auto command = std::make_shared<RolloutsCommand>();
  GenerateCommand& generate = command->generate;
  generate.samples = 16;
  add_model_options(*added, generate);
  added
      ->add_option(
          "--problems", generate.input, "JSON lines with id and prompt, messages or prompt_ids")
      ->required();
  added
      ->add_option(
          "--output", generate.output, "Directory of the run: new, empty, or to go on with")
      ->required();
  added->add_option(
      "--system", generate.system, "System message of problems whose messages have none");
  added->add_option("--samples", generate.samples, "Answers to each problem")
      ->check(CLI::Range(std::int64_t{1}, kMostSamples))
      ->capture_default_str();
  add_sampling_options(*added, generate);
  added->callback(
      [config, command, &context] { run_rollouts(*command, config->resolve(), context); });
}

}  // namespace bifocal
