// Options that `bifocal generate` and `bifocal rollouts` share.
#include <CLI/CLI.hpp>

#include "cli/generate_command.h"

namespace bifocal {

void add_model_options(CLI::App& app, GenerateCommand& command) {
  app.add_option(
      "--model",
      command.model,
      "A Hugging Face directory (teacher or student), a run directory or a checkpoint; none: "
      "the teacher under student.preset, untrained");
  app.add_option(
      "--tokenizer", command.tokenizer, "tokenizer.json; default: that beside the model");
  app.add_option("--chat-template",
                 command.chat_template,
                 "chatml, smollm2 or llama3; default: that of the model's directory");
  app.add_option("--batch", command.batch, "Sequences that advance together")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--prefill-chunk",
                 command.prefill_chunk,
                 "Prompt tokens read at once; 0: 512 on CPUs, 8192 on GPUs")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void resolve_prefill_chunk(GenerateCommand& command, const RunConfig& config) {
  if (command.prefill_chunk == 0) {
    command.prefill_chunk = config.run.device == "cuda" ? 8192 : 512;
  }
}

void add_sampling_options(CLI::App& app, GenerateCommand& command) {
  app.add_option("--max-new-tokens", command.max_new_tokens, "Longest answer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--sample",
               command.sample,
               "Draw as the model's generation_config.json says (temperature, or 1; top_k; top_p)");
  app.add_option("--temperature", command.temperature, "0: greedy, which is the default")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-k", command.top_k, "Most likely tokens to draw from; 0: all")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-p", command.top_p, "Probability that the drawn set reaches")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", command.seed, "Of the draws")->capture_default_str();
  app.add_option("--stop-id",
                 command.stop_ids,
                 "Ids that end an answer; default: eos_token_id of the model's "
                 "generation_config.json or config.json, and the end of turn of a chat");
  app.add_option("--stop", command.stop_tokens, "The same by the token's text");
  app.add_flag("--ignore-eos", command.ignore_eos, "End answers at --max-new-tokens alone");
}

}  // namespace bifocal
