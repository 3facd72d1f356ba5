// JSON-lines documents made into token shards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bifocal {

// Each input line is one document, an object with
// - ids and, if wanted, keep (0 or 1 per token; by default every token but the last is kept), or
// - prompt_ids and answer_ids: the two joined, and what predicts an answer token is kept, or
// - text: words of a WordLevel tokenizer; every token but the last is kept.
struct TokenizeOptions {
  std::vector<std::string> inputs;
  std::string output;           // directory to make; it must not exist or be empty
  std::string tokenizer;        // tokenizer.json; may be empty where a vocabulary is given
  std::int64_t vocabulary = 0;  // ids are below it; 0: the tokenizer's
  double held_out = 0.01;       // share of documents set aside, by the hash of their ids
  std::int64_t shard_tokens = std::int64_t{1} << 25;  // a shard ends before it has more
};

struct SplitReport {
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t kept = 0;  // by the mask
  std::int64_t shards = 0;
};

struct TokenizeReport {
  SplitReport train;
  SplitReport held_out;
  std::vector<std::int64_t> lengths;  // [i]: documents of 2^i to 2^(i+1) - 1 tokens
};

// Writes train-00000.h5.., held_out-00000.h5.. The directory appears only when all of them are
// whole. Throws Error that names file and line for what cannot be a document.
TokenizeReport tokenize(const TokenizeOptions& options);

// A few lines for people.
std::string to_text(const TokenizeReport& report);

}  // namespace bifocal
