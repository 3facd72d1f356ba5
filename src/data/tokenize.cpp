// Documents of text files made into token shards.
#include "data/tokenize.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "data/document.h"
#include "data/json_lines.h"
#include "data/ordered_pipeline.h"
#include "data/staged_directory.h"
#include "data/text_source.h"
#include "data/token_file.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

// --- From files to batches of lines --------------------------------------------------------------

// Lines of one file: enough for a worker to be busy with, few enough for all to be busy.
struct Batch {
  struct Line {
    std::size_t begin = 0;  // in text; a line ends where the next begins
    std::int64_t number = 0;
  };

  std::size_t file = 0;  // index
  std::string text;
  std::vector<Line> lines;
  std::int64_t file_bytes = 0;  // taken from the file for this batch
  bool ends_file = false;

  std::size_t weight() const { return text.size(); }

  std::string_view line(std::size_t index) const {
    const std::size_t begin = lines[index].begin;
    const std::size_t end = index + 1 < lines.size() ? lines[index + 1].begin : text.size();
    return std::string_view(text).substr(begin, end - begin);
  }
};

class BatchReader {
 public:
  explicit BatchReader(const std::vector<TextFile>& files) : files_(&files) {}

  // Nothing at the end of the last file. An error comes after the lines before it.
  std::optional<Batch> next() {
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (file_ == files_->size()) {
      return std::nullopt;
    }
    Batch batch{.file = file_};
    try {
      fill(batch);
    } catch (...) {
      if (batch.lines.empty()) {
        throw;
      }
      error_ = std::current_exception();
    }
    return batch;
  }

 private:
  void fill(Batch& batch) {
    constexpr std::size_t kBytes = std::size_t{1} << 17;
    if (!reader_) {
      reader_.emplace((*files_)[file_].path);
    }
    const std::int64_t bytes_before = reader_->bytes_read();
    while (batch.text.size() < kBytes) {
      if (!reader_->next(line_)) {
        batch.ends_file = true;
        break;
      }
      if (!is_blank(line_)) {
        batch.lines.push_back({.begin = batch.text.size(), .number = reader_->number()});
        batch.text += line_;
      }
    }
    batch.file_bytes = reader_->bytes_read() - bytes_before;
    if (batch.ends_file) {
      reader_.reset();
      ++file_;
    }
  }

  const std::vector<TextFile>* files_;
  std::size_t file_ = 0;
  std::optional<LineReader> reader_;
  std::string line_;
  std::exception_ptr error_;
};

// --- From batches to documents -------------------------------------------------------------------

struct SplitDocument {
  Document document;
  Split split = Split::train;
};

struct Documents {
  std::size_t file = 0;
  std::vector<SplitDocument> documents;
  std::int64_t empty = 0;
  std::int64_t too_long = 0;
  std::int64_t text_bytes = 0;
  std::int64_t file_bytes = 0;
  bool ends_file = false;
};

fs::path directory_of(const fs::path& path) {
  const fs::path directory = fs::is_directory(path) ? path : path.parent_path();
  return directory.empty() ? "." : directory;
}

// What every line is read with.
class Reading {
 public:
  explicit Reading(const TokenizeOptions& options)
      : max_tokens_(options.max_tokens), held_out_(options.held_out) {
    if (!options.tokenizer.empty()) {
      tokenizer_ = read_tokenizer(options.tokenizer);
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
    header_.vocabulary_hash = tokenizer_ ? tokenizer_->hash() : vocabulary_hash(header_.vocabulary);
    reader_.emplace(document_options(options));
  }

  // Of a shard of train documents.
  const TokenFileHeader& header() const { return header_; }

  Documents read(const Batch& batch, const std::string& path) const {
    Documents result{.file = batch.file,
                     .text_bytes = static_cast<std::int64_t>(batch.text.size()),
                     .file_bytes = batch.file_bytes,
                     .ends_file = batch.ends_file};
    for (std::size_t i = 0; i < batch.lines.size(); ++i) {
      try {
        add(result, reader_->read(batch.line(i)));
      } catch (const std::exception& error) {
        fail("{} ({}:{})", error.what(), path, batch.lines[i].number);
      }
    }
    return result;
  }

 private:
  DocumentOptions document_options(const TokenizeOptions& options) const {
    DocumentOptions result{.tokenizer = tokenizer_.get(),
                           .end_token = options.end_token,
                           .vocabulary = header_.vocabulary,
                           .form = document_form(options.form)};
    if (!options.chat_template.empty()) {
      result.chat = ChatTemplate::named(options.chat_template);
    } else if (tokenizer_) {
      try {
        result.chat = ChatTemplate::of_directory(directory_of(options.tokenizer));
      } catch (const Error& error) {
        result.no_chat_reason = error.what();  // told when a line needs the template
      }
    }
    return result;
  }

  void add(Documents& result, Document document) const {
    const auto tokens = static_cast<std::int64_t>(document.ids.size());
    if (tokens == 0) {
      result.empty += 1;
    } else if (max_tokens_ > 0 && tokens > max_tokens_) {
      result.too_long += 1;
    } else {
      const Split split = split_of(document.ids, held_out_);
      result.documents.push_back({std::move(document), split});
    }
  }

  std::int64_t max_tokens_;
  double held_out_;
  std::unique_ptr<Tokenizer> tokenizer_;
  TokenFileHeader header_;
  std::optional<DocumentReader> reader_;
};

// --- From documents to shards --------------------------------------------------------------------

// What the system said, out of HDF5's long report of a write that failed.
std::string_view system_reason(std::string_view report) {
  constexpr std::string_view kBefore = "error message = '";
  const std::size_t begin = report.find(kBefore);
  if (begin == std::string_view::npos) {
    return report;
  }
  report.remove_prefix(begin + kBefore.size());
  return report.substr(0, report.find('\''));
}

// The shards of one split, written as they fill.
class ShardSeries {
 public:
  ShardSeries(const TokenFileHeader& header, Split split, fs::path directory, std::int64_t tokens)
      : header_(with_split(header, split)),
        directory_(std::move(directory)),
        shard_tokens_(tokens),
        writer_(header_) {}

  void append(const Document& document, std::int64_t kept) {
    const auto tokens = static_cast<std::int64_t>(document.ids.size());
    if (writer_.documents() > 0 && writer_.tokens() + tokens > shard_tokens_) {
      flush();
    }
    writer_.append(document.ids, document.keep);
    report_.documents += 1;
    report_.tokens += tokens;
    report_.kept += kept;
  }

  // Writes what is left.
  SplitReport finish() {
    if (writer_.documents() > 0) {
      flush();
    }
    return report_;
  }

 private:
  static TokenFileHeader with_split(TokenFileHeader header, Split split) {
    header.split = split;
    return header;
  }

  void flush() {
    const fs::path path =
        directory_ / fmt::format("{}-{:05}.h5", split_name(header_.split), report_.shards++);
    try {
      writer_.write(path.string());
    } catch (const Error& error) {
      fail("[tokenize] cannot write {}: {}: make space, or name another --output; nothing was kept",
           path.string(),
           system_reason(error.what()));
    }
    writer_ = TokenFileWriter(header_);
  }

  TokenFileHeader header_;
  fs::path directory_;
  std::int64_t shard_tokens_;
  TokenFileWriter writer_;
  SplitReport report_;
};

class Writing {
 public:
  Writing(const TokenizeOptions& options,
          const std::vector<TextFile>& files,
          const TokenFileHeader& header,
          const fs::path& directory)
      : files_(&files),
        train_(header, Split::train, directory, options.shard_tokens),
        held_out_(header, Split::held_out, directory, options.shard_tokens) {
    for (const std::string& input : options.inputs) {
      report_.sources.push_back({.name = input});
    }
    progress_.all_files = files.size();
    for (const TextFile& file : files) {
      progress_.all_bytes += file.bytes;
      report_.sources[file.argument].files += 1;
    }
  }

  const TokenizeProgress& progress() const { return progress_; }

  void append(const Documents& batch) {
    SourceReport& source = report_.sources[(*files_)[batch.file].argument];
    for (const auto& [document, split] : batch.documents) {
      const std::int64_t kept = std::ranges::count(document.keep, 1);
      (split == Split::train ? train_ : held_out_).append(document, kept);
      const auto tokens = static_cast<std::int64_t>(document.ids.size());
      source.add(tokens, kept);
      progress_.tokens += tokens;
    }
    source.empty += batch.empty;
    source.too_long += batch.too_long;
    source.bytes += batch.text_bytes;
    progress_.documents += static_cast<std::int64_t>(batch.documents.size());
    progress_.text_bytes += batch.text_bytes;
    progress_.bytes += batch.file_bytes;
    progress_.files += batch.ends_file ? 1 : 0;
  }

  TokenizeReport finish() {
    report_.train = train_.finish();
    report_.held_out = held_out_.finish();
    return std::move(report_);
  }

 private:
  const std::vector<TextFile>* files_;
  ShardSeries train_;
  ShardSeries held_out_;
  TokenizeReport report_;
  TokenizeProgress progress_;
};

void check(const TokenizeOptions& options) {
  BIFOCAL_REQUIRE(options.held_out >= 0.0 && options.held_out <= 1.0,
                  "[tokenize] the held-out share must be from 0 to 1, got {}",
                  options.held_out);
  BIFOCAL_REQUIRE(options.shard_tokens >= 1,
                  "[tokenize] a shard needs at least one token, got {}",
                  options.shard_tokens);
  BIFOCAL_REQUIRE(options.max_tokens >= 0,
                  "[tokenize] the most tokens of a document cannot be {}",
                  options.max_tokens);
}

PipelineLimits limits_of(const TokenizeOptions& options) {
  constexpr std::size_t kMostText = std::size_t{1} << 28;
  const std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t workers = options.threads > 0 ? options.threads : cores;
  return {.workers = workers, .items = 4 * workers + 4, .weight = kMostText};
}

}  // namespace

TokenizeReport tokenize(const TokenizeOptions& options) {
  check(options);
  const std::vector<TextFile> files = find_text_files(options.inputs);
  const Reading reading(options);
  StagedDirectory directory(options.output);
  BatchReader batches(files);
  Writing writing(options, files, reading.header(), directory.staged());
  const auto idle = [&] {
    BIFOCAL_REQUIRE(!options.should_stop || !options.should_stop(),
                    "[tokenize] stopped before the end: {} was not made, nothing was kept",
                    options.output);
    if (options.on_progress) {
      options.on_progress(writing.progress());
    }
  };
  OrderedPipeline<Batch, Documents>::run(
      limits_of(options),
      [&] { return batches.next(); },
      [&](const Batch& batch) { return reading.read(batch, files[batch.file].path); },
      [&](Documents&& documents) { writing.append(documents); },
      idle);
  TokenizeReport report = writing.finish();
  BIFOCAL_REQUIRE(report.train.documents + report.held_out.documents > 0,
                  "[tokenize] the inputs hold no document");
  idle();
  directory.publish();
  return report;
}

}  // namespace bifocal
