// JSON-lines documents made into token shards.
#include "data/tokenize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "data/json_lines.h"
#include "data/token_file.h"
#include "data/word_level_tokenizer.h"

namespace bifocal {

namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

struct Document {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> keep;
};

// Keeps what predicts tokens [begin, end) of a document.
std::vector<std::uint8_t> keep_before(std::size_t begin, std::size_t end) {
  std::vector<std::uint8_t> keep(end, 0);
  for (std::size_t t = std::max<std::size_t>(begin, 1); t < end; ++t) {
    keep[t - 1] = 1;
  }
  return keep;
}

std::vector<std::uint8_t> keep_of(const Json& array) {
  const std::vector<std::int32_t> values = int32_array(array);
  BIFOCAL_REQUIRE(std::ranges::all_of(values, [](auto value) { return value == 0 || value == 1; }),
                  "[tokenize] keep holds 0 and 1 only");
  return {values.begin(), values.end()};
}

// Lines into documents.
class LineReader {
 public:
  explicit LineReader(const TokenizeOptions& options) {
    if (!options.tokenizer.empty()) {
      tokenizer_ = WordLevelTokenizer::read(options.tokenizer);
    }
    const std::int64_t words = tokenizer_ ? tokenizer_->vocabulary() : 0;
    header_.vocabulary = options.vocabulary > 0 ? options.vocabulary : words;
    BIFOCAL_REQUIRE(header_.vocabulary > 0,
                    "[tokenize] the vocabulary is unknown: give --tokenizer or --vocabulary");
    BIFOCAL_REQUIRE(words <= header_.vocabulary,
                    "[tokenize] the tokenizer's {} words do not fit a vocabulary of {}: raise "
                    "--vocabulary",
                    words,
                    header_.vocabulary);
    header_.vocabulary_hash =
        tokenizer_ ? vocabulary_hash(tokenizer_->words()) : vocabulary_hash(header_.vocabulary);
  }

  // Of a shard of train documents.
  const TokenFileHeader& header() const { return header_; }

  Document read(const Json& line) const {
    Document document;
    if (line.contains("ids")) {
      document.ids = int32_array(line["ids"]);
      document.keep =
          line.contains("keep") ? keep_of(line["keep"]) : keep_before(0, document.ids.size());
    } else if (line.contains("prompt_ids") && line.contains("answer_ids")) {
      document.ids = int32_array(line["prompt_ids"]);
      const std::size_t prompt = document.ids.size();
      const std::vector<std::int32_t> answer = int32_array(line["answer_ids"]);
      document.ids.insert(document.ids.end(), answer.begin(), answer.end());
      document.keep = keep_before(prompt, document.ids.size());
    } else {
      BIFOCAL_REQUIRE(line.contains("text"),
                      "[tokenize] a document needs ids, prompt_ids and answer_ids, or text");
      BIFOCAL_REQUIRE(tokenizer_.has_value(), "[tokenize] text needs --tokenizer");
      document.ids = tokenizer_->encode(line["text"].get<std::string>());
      document.keep = keep_before(0, document.ids.size());
    }
    return document;
  }

 private:
  std::optional<WordLevelTokenizer> tokenizer_;
  TokenFileHeader header_;
};

// The shards of one split, written as they fill.
class ShardSeries {
 public:
  ShardSeries(TokenFileHeader header, fs::path directory, std::int64_t shard_tokens)
      : header_(std::move(header)),
        directory_(std::move(directory)),
        shard_tokens_(shard_tokens),
        writer_(header_) {}

  void append(const Document& document) {
    const auto tokens = static_cast<std::int64_t>(document.ids.size());
    if (writer_.documents() > 0 && writer_.tokens() + tokens > shard_tokens_) {
      flush();
    }
    writer_.append(document.ids, document.keep);
    report_.documents += 1;
    report_.tokens += tokens;
    report_.kept += std::ranges::count(document.keep, 1);
  }

  // Writes what is left.
  SplitReport finish() {
    if (writer_.documents() > 0) {
      flush();
    }
    return report_;
  }

 private:
  void flush() {
    const std::string name =
        fmt::format("{}-{:05}.h5", split_name(header_.split), report_.shards++);
    writer_.write((directory_ / name).string());
    writer_ = TokenFileWriter(header_);
  }

  TokenFileHeader header_;
  fs::path directory_;
  std::int64_t shard_tokens_;
  TokenFileWriter writer_;
  SplitReport report_;
};

// A directory that appears under its name only when it is published, and is removed when it is not.
class StagedDirectory {
 public:
  explicit StagedDirectory(const std::string& path) : path_(fs::path(path).lexically_normal()) {
    if (!path_.has_filename()) {
      path_ = path_.parent_path();  // "name/"
    }
    BIFOCAL_REQUIRE(!path_.empty(), "[tokenize] no output directory is named");
    staged_ = path_;
    staged_ += ".partial";
    BIFOCAL_REQUIRE(!fs::exists(path_) || (fs::is_directory(path_) && fs::is_empty(path_)),
                    "[tokenize] {} holds something already: name another directory, or remove it",
                    path_.string());
    std::error_code code;
    fs::create_directories(staged_.parent_path(), code);
    BIFOCAL_REQUIRE(fs::create_directory(staged_, code),
                    "[tokenize] cannot make {}{}: if an interrupted run left it, remove it",
                    staged_.string(),
                    code ? " (" + code.message() + ")" : "");
  }

  ~StagedDirectory() {
    std::error_code ignored;
    if (!published_) {
      fs::remove_all(staged_, ignored);
    }
  }

  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;
  StagedDirectory(StagedDirectory&&) = delete;
  StagedDirectory& operator=(StagedDirectory&&) = delete;

  const fs::path& staged() const { return staged_; }

  void publish() {
    fsync_directory(staged_);
    std::error_code code;
    fs::rename(staged_, path_, code);
    BIFOCAL_REQUIRE(!code,
                    "[tokenize] cannot rename {} to {}: {}",
                    staged_.string(),
                    path_.string(),
                    code.message());
    published_ = true;
  }

 private:
  fs::path path_;
  fs::path staged_;
  bool published_ = false;
};

}  // namespace

TokenizeReport tokenize(const TokenizeOptions& options) {
  BIFOCAL_REQUIRE(options.held_out >= 0.0 && options.held_out <= 1.0,
                  "[tokenize] the held-out share must be from 0 to 1, got {}",
                  options.held_out);
  BIFOCAL_REQUIRE(options.shard_tokens >= 1,
                  "[tokenize] a shard needs at least one token, got {}",
                  options.shard_tokens);
  const LineReader reader(options);
  StagedDirectory directory(options.output);
  TokenFileHeader header = reader.header();
  header.split = Split::train;
  ShardSeries train(header, directory.staged(), options.shard_tokens);
  header.split = Split::held_out;
  ShardSeries held_out(header, directory.staged(), options.shard_tokens);
  TokenizeReport report;
  for (const std::string& input : options.inputs) {
    for_each_json_line(input, [&](const Json& line) {
      const Document document = reader.read(line);
      const bool is_held_out = split_of(document.ids, options.held_out) == Split::held_out;
      (is_held_out ? held_out : train).append(document);
      const auto power = static_cast<std::size_t>(std::bit_width(document.ids.size()) - 1);
      report.lengths.resize(std::max(report.lengths.size(), power + 1));
      ++report.lengths[power];
    });
  }
  report.train = train.finish();
  report.held_out = held_out.finish();
  BIFOCAL_REQUIRE(report.train.documents + report.held_out.documents > 0,
                  "[tokenize] the inputs hold no document");
  directory.publish();
  return report;
}

std::string to_text(const TokenizeReport& report) {
  std::string text = fmt::format(
      "{:<9} {:>10} {:>14} {:>14} {:>7}\n", "split", "documents", "tokens", "kept", "shards");
  for (const auto& [split, part] :
       {std::pair{Split::train, report.train}, std::pair{Split::held_out, report.held_out}}) {
    text += fmt::format("{:<9} {:>10} {:>14} {:>14} {:>7}\n",
                        split_name(split),
                        part.documents,
                        part.tokens,
                        part.kept,
                        part.shards);
  }
  const std::int64_t documents = report.train.documents + report.held_out.documents;
  text += fmt::format(
      "held out: {:.2f} % of the documents\n",
      100.0 * static_cast<double>(report.held_out.documents) / static_cast<double>(documents));
  text += "tokens of a document: documents\n";
  for (std::size_t power = 0; power < report.lengths.size(); ++power) {
    if (report.lengths[power] > 0) {
      const std::uint64_t least = std::uint64_t{1} << power;
      text += fmt::format("{:>9} to {:<9} {:>9}\n", least, 2 * least - 1, report.lengths[power]);
    }
  }
  return text;
}

}  // namespace bifocal
