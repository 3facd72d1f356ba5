// `bifocal tokenize`: JSON-lines documents into token shards.
#include "data/tokenize.h"

#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"

namespace bifocal {

void add_tokenize_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand("tokenize", "Make token shards of JSON-lines documents");
  auto options = std::make_shared<TokenizeOptions>();
  command
      ->add_option("inputs",
                   options->inputs,
                   "JSON-lines files; a line has ids (and keep), prompt_ids and answer_ids, or "
                   "text")
      ->required()
      ->check(CLI::ExistingFile);
  command->add_option("--output", options->output, "Directory to make")->required();
  command->add_option("--tokenizer", options->tokenizer, "tokenizer.json (WordLevel)")
      ->check(CLI::ExistingFile);
  command
      ->add_option("--vocabulary",
                   options->vocabulary,
                   "Ids are below it; needed without --tokenizer, default: the tokenizer's size")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--held-out", options->held_out, "Share of documents set aside, by their hash")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--shard-tokens", options->shard_tokens, "Most tokens of a shard")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->callback([options, &context] {
    require_one_rank(context, "tokenize");
    fmt::print("{}", to_text(tokenize(*options)));
  });
}

}  // namespace bifocal
