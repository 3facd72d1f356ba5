// JSON lines made into token shards.
#include "data/tokenize.h"

#include <array>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "data/problem_file.h"
#include "data/register_machine.h"
#include "data/row_source.h"
#include "data/token_file.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

struct Stored {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> keep;
};

std::vector<Stored> documents_of(const std::string& path) {
  const TokenFile file(path);
  std::vector<Stored> documents;
  for (std::int64_t i = 0; i < file.documents(); ++i) {
    std::array<std::int64_t, 2> offsets{};
    file.read_offsets(i, offsets);
    const auto length = static_cast<std::size_t>(offsets[1] - offsets[0]);
    Stored document{std::vector<std::int32_t>(length), std::vector<std::uint8_t>(length)};
    file.read_ids(offsets[0], document.ids);
    file.read_keep(offsets[0], document.keep);
    documents.push_back(std::move(document));
  }
  return documents;
}

// A directory with an input file and the options that tokenize it.
class Input {
 public:
  explicit Input(const std::string& lines) {
    write_file_atomically(directory_.path("in.jsonl"), lines);
    options.inputs = {directory_.path("in.jsonl")};
    options.output = directory_.path("shards");
    options.vocabulary = 128;
    options.held_out = 0.0;
  }

  std::string shard(const std::string& name) const { return options.output + "/" + name; }

  std::string path(const std::string& name) const { return directory_.path(name); }

  // The text of the error that tokenize throws; empty without one.
  std::string fault() const {
    try {
      tokenize(options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  TokenizeOptions options;

 private:
  test::TemporaryDirectory directory_;
};

std::string problem_lines(std::int64_t count) {
  const RegisterVocabulary vocabulary;
  std::string lines;
  for (std::int64_t i = 0; i < count; ++i) {
    lines += problem_line(vocabulary, make_problem(vocabulary, 1, i, draw_steps(1, i, 1, 46)));
    lines += '\n';
  }
  return lines;
}

TEST(Tokenize, ReadsEachFormOfLine) {
  Input input(
      "{\"ids\": [5, 6, 7]}\n"
      "\n"
      "{\"ids\": [8, 9], \"keep\": [0, 1]}\n"
      "{\"prompt_ids\": [1, 2, 3], \"answer_ids\": [4, 5]}\n"
      "{\"text\": \"step  #3 add\\tr2 7\"}\n"
      "{\"ids\": [11]}\n");
  input.options.vocabulary = 0;
  input.options.tokenizer = input.path("tokenizer.json");
  write_file_atomically(input.options.tokenizer, RegisterVocabulary().tokenizer_json());
  const TokenizeReport report = tokenize(input.options);
  const auto documents = documents_of(input.shard("train-00000.h5"));
  ASSERT_EQ(documents.size(), 5U);
  EXPECT_EQ(documents[0].ids, (std::vector<std::int32_t>{5, 6, 7}));
  EXPECT_EQ(documents[0].keep, (std::vector<std::uint8_t>{1, 1, 0}));
  EXPECT_EQ(documents[1].keep, (std::vector<std::uint8_t>{0, 1}));
  EXPECT_EQ(documents[2].ids, (std::vector<std::int32_t>{1, 2, 3, 4, 5}));
  EXPECT_EQ(documents[2].keep, (std::vector<std::uint8_t>{0, 0, 1, 1, 0}));
  EXPECT_EQ(documents[3].ids, (std::vector<std::int32_t>{87, 23, 88, 12, 7}));
  EXPECT_EQ(documents[4].keep, (std::vector<std::uint8_t>{0}));
  EXPECT_EQ(report.train.documents, 5);
  EXPECT_EQ(report.train.tokens, 16);
  EXPECT_EQ(report.train.kept, 9);
  EXPECT_EQ(report.total().lengths, (std::vector<std::int64_t>{1, 2, 2}));
  EXPECT_EQ(TokenFile(input.shard("train-00000.h5")).header().vocabulary_hash,
            vocabulary_hash(RegisterVocabulary().words()));
}

TEST(Tokenize, SplitsAndShardsRegisterMachineProblems) {
  Input input(problem_lines(1000));
  input.options.held_out = 0.1;
  input.options.shard_tokens = 50000;
  const TokenizeReport report = tokenize(input.options);
  EXPECT_EQ(report.train.documents + report.held_out.documents, 1000);
  EXPECT_NEAR(static_cast<double>(report.held_out.documents), 100.0, 40.0);  // 4 deviations
  EXPECT_GT(report.train.shards, 1);
  std::int64_t documents = 0;
  for (const auto& entry : std::filesystem::directory_iterator(input.options.output)) {
    const TokenFile file(entry.path().string());
    documents += file.documents();
    EXPECT_LE(file.tokens(), 50000);
    const auto name = entry.path().filename().string();
    EXPECT_EQ(name.substr(0, name.find('-')), split_name(file.header().split));
    for (const Stored& document : documents_of(entry.path().string())) {
      EXPECT_EQ(split_of(document.ids, 0.1), file.header().split);
    }
  }
  EXPECT_EQ(documents, 1000);
  EXPECT_FALSE(std::filesystem::exists(input.options.output + ".partial"));
}

TEST(Tokenize, ProblemsBecomeRowsThatKeepTheAnswers) {
  Input input(problem_lines(200));
  tokenize(input.options);
  RowSourceOptions options;
  options.mixture = {{{.name = "problems", .paths = {input.options.output}}}};
  options.row_tokens = 1024;
  options.keep = Keep::assistant;
  options.vocabulary = 128;
  const RegisterVocabulary vocabulary;
  options.pad_id = vocabulary.pad();
  const RowSource source(options);
  std::int64_t kept = 0;
  for (std::int64_t r = 0; r < source.rows_without_repeats(1000); ++r) {
    const Row row = source.row(r);
    bool in_answer = false;
    for (std::size_t t = 0; t < row.ids.size(); ++t) {
      // From the prompt's last word up to the answer's last but one.
      in_answer = row.ids[t] == vocabulary.answer() ||
                  (in_answer && row.ids[t] != vocabulary.end_of_text());
      EXPECT_EQ(row.keep[t], in_answer ? 1 : 0);
      kept += row.keep[t];
    }
  }
  EXPECT_GT(kept, source.sources()[0].tokens / 2);
}

TEST(Tokenize, ErrorsNameFileAndLine) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"ids\": [1, 128]}", "ids must be from 0 to 127, got 128"},
      {"{\"ids\": [1, -1]}", "got -1"},
      {"{\"ids\": [4294967297]}", "integer of 32 bits"},
      {"{\"ids\": [1.5]}", "integer of 32 bits"},
      {"{\"ids\": 3}", "array of integers"},
      {"{\"ids\": [1, 2], \"keep\": [1]}", "one entry per token"},
      {"{\"ids\": [1, 2], \"keep\": [1, 256]}", "0 and 1 only"},
      {"{\"prompt_ids\": [1]}", "a line needs one of messages, text, ids"},
      {"{\"text\": \"add\"}", "text needs --tokenizer"},
      {"{\"ids\": [1, 2}", "byte 14: wanted a JSON value"},
      {"[1, 2]", "should hold an object"},
  };
  for (const auto& [line, wanted] : cases) {
    const Input input("{\"ids\": [1]}\n\n" + line + "\n");
    const std::string fault = input.fault();
    EXPECT_NE(fault.find(wanted), std::string::npos) << fault;
    EXPECT_NE(fault.find("in.jsonl:3"), std::string::npos) << fault;
    EXPECT_FALSE(std::filesystem::exists(input.options.output));
    EXPECT_FALSE(std::filesystem::exists(input.options.output + ".partial"));
  }
}

TEST(Tokenize, UnfitOptionsAreRefused) {
  Input input("{\"ids\": [1]}\n");
  input.options.vocabulary = 0;
  EXPECT_NE(input.fault().find("--vocabulary"), std::string::npos);
  input.options.tokenizer = input.path("tokenizer.json");
  write_file_atomically(input.options.tokenizer, RegisterVocabulary().tokenizer_json());
  input.options.vocabulary = 100;
  EXPECT_NE(input.fault().find("do not fit"), std::string::npos);
  input.options.vocabulary = 0;
  input.options.output += '/';
  EXPECT_EQ(input.fault(), "");
  EXPECT_NE(input.fault().find("holds something already"), std::string::npos);
  const Input empty("\n");
  EXPECT_NE(empty.fault().find("no document"), std::string::npos);
}

TEST(Tokenize, ReportReadsAsATable) {
  TokenizeReport report;
  report.train = {.documents = 3, .tokens = 12, .kept = 9, .shards = 1};
  report.held_out = {.documents = 1, .tokens = 2, .kept = 1, .shards = 1};
  report.sources = {{.name = "in.jsonl", .documents = 4, .lengths = {0, 1, 3}}};
  const std::string text = to_text(report);
  EXPECT_NE(text.find("held out: 25.00 % of the documents"), std::string::npos) << text;
  EXPECT_NE(text.find("4 to          7            3"), std::string::npos) << text;
}

}  // namespace
}  // namespace bifocal
