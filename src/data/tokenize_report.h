// What tokenising read and wrote, for people and programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace bifocal {

struct SplitReport {
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t kept = 0;  // by the mask
  std::int64_t shards = 0;
};

// Of one word of the command line, or of all.
struct SourceReport {
  std::string name;
  std::int64_t files = 0;
  std::int64_t bytes = 0;  // of text, decompressed
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t kept = 0;
  std::int64_t empty = 0;             // documents without a token, left out
  std::int64_t too_long = 0;          // documents above max_tokens, left out
  std::vector<std::int64_t> lengths;  // [i]: documents of 2^i to 2^(i+1) - 1 tokens

  // A document that is written.
  void add(std::int64_t num_tokens, std::int64_t num_kept);
};

struct TokenizeReport {
  SplitReport train;
  SplitReport held_out;
  std::vector<SourceReport> sources;

  // The sum of the sources.
  SourceReport total() const;
};

// Tables of splits, sources and lengths.
std::string to_text(const TokenizeReport& report);

// {"splits": {..}, "sources": [..], "total": {..}}; lengths as [{"from", "to", "documents"}].
nlohmann::ordered_json to_json(const TokenizeReport& report);

}  // namespace bifocal
