// Documents of text files made into token shards.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/tokenize_report.h"

namespace bifocal {

// Where a run stands.
struct TokenizeProgress {
  std::size_t files = 0;  // read to their ends
  std::size_t all_files = 0;
  std::int64_t bytes = 0;  // of the files as they lie on the disk
  std::int64_t all_bytes = 0;
  std::int64_t text_bytes = 0;  // of lines, decompressed
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
};

struct TokenizeOptions {
  std::vector<std::string> inputs;  // files, directories, patterns: see text_source.h
  std::string output;               // directory to make; it must not exist or be empty
  std::string tokenizer;            // tokenizer.json, or a directory with one; may be empty where a
                                    // vocabulary is given
  std::string chat_template;        // name; empty: that of the tokenizer's directory
  std::string form = "any";         // of lines that hold several: see document.h
  std::string end_token;            // after text and completions; empty: none
  std::int64_t vocabulary = 0;      // ids are below it; 0: the tokenizer's
  double held_out = 0.01;           // share of documents set aside, by the hash of their ids
  std::int64_t shard_tokens = std::int64_t{1} << 25;  // a shard ends before it has more
  std::int64_t max_tokens = 0;  // longer documents are left out; 0: none is, packing cuts them
  std::size_t threads = 0;      // that tokenize; 0: as many as the machine has cores for us

  // Called on the calling thread, at least ten times a second. should_stop: whether to give up.
  std::function<void(const TokenizeProgress&)> on_progress;
  std::function<bool()> should_stop;
};

// Writes train-00000.h5.. and held_out-00000.h5.. for the documents in their order in the files.
// Their bytes do not depend on the number of threads. The directory appears only when all of them
// are whole. Throws Error that names file and line of the first line that cannot be a document, and
// where it was stopped.
TokenizeReport tokenize(const TokenizeOptions& options);

}  // namespace bifocal
