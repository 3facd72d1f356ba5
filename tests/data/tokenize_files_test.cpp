// Many files made into token shards: threads, counts by source, what is left out, errors.
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "data/register_machine.h"
#include "data/tokenize.h"
#include "support/compress.h"
#include "support/temporary_directory.h"
#include "support/token_shard.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;

class TokenizeFiles : public testing::Test {
 protected:
  TokenizeFiles() {
    options_.output = directory_.path("shards");
    options_.vocabulary = 1000;
    options_.held_out = 0.1;
    options_.inputs = {directory_.path("in")};
    options_.threads = 2;
  }

  void write(const std::string& name, const std::string& bytes) const {
    const fs::path path = directory_.path(name);
    fs::create_directories(path.parent_path());
    write_file_atomically(path, bytes);
  }

  std::string fault() const {
    try {
      tokenize(options_);
    } catch (const Error& error) {
      EXPECT_FALSE(fs::exists(options_.output));
      EXPECT_FALSE(fs::exists(options_.output + ".partial"));
      return error.what();
    }
    return "";
  }

  // Names and bytes of the shards; the directory is removed.
  std::map<std::string, std::string> shards() const {
    std::map<std::string, std::string> bytes;
    for (const auto& entry : fs::directory_iterator(options_.output)) {
      bytes[entry.path().filename().string()] = read_file(entry.path());
    }
    fs::remove_all(options_.output);
    return bytes;
  }

  test::TemporaryDirectory directory_;
  TokenizeOptions options_;
};

std::string lines(std::int64_t first, std::int64_t count) {
  std::string text;
  for (std::int64_t i = first; i < first + count; ++i) {
    const auto draw = [&](std::uint64_t bound, std::uint64_t at) {
      return random_below(bound, 5, static_cast<std::uint64_t>(i), at);
    };
    text += "{\"ids\": [1";
    for (std::uint64_t at = draw(i % 40 == 0 ? 3000 : 90, 0); at > 0; --at) {
      text += fmt::format(", {}", draw(1000, at));
    }
    text += "]}\n";
  }
  return text;
}

TEST_F(TokenizeFiles, BytesDoNotDependOnThreadsTimeOrCompression) {
  options_.shard_tokens = 60000;
  write("in/a.jsonl", lines(0, 1500));
  write("in/b.jsonl", "");
  write("in/c.jsonl", lines(1500, 700));
  options_.threads = 1;
  const TokenizeReport report = tokenize(options_);
  EXPECT_EQ(report.total().documents, 2200);
  EXPECT_GT(report.train.shards, 2);
  const auto wanted = shards();
  EXPECT_EQ(static_cast<std::int64_t>(wanted.size()), report.train.shards + report.held_out.shards);
  fs::rename(directory_.path("in"), directory_.path("plain"));
  write("in/a.jsonl.gz", test::gzip(lines(0, 1000)) + test::gzip(lines(1000, 500)));
  write("in/c.jsonl.zst", test::zstd(lines(1500, 700)));
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // times in files count seconds
  for (const std::size_t threads : {2U, 5U}) {
    options_.threads = threads;
    tokenize(options_);
    EXPECT_TRUE(shards() == wanted) << threads << " threads";
  }
}

TEST_F(TokenizeFiles, ReportsEachWordOfTheCommandLine) {
  write("in/a.jsonl", "{\"ids\": [1]}\n{\"ids\": []}\n{\"ids\": [1, 2, 3]}\n");
  write("in/b.jsonl.gz", test::gzip("{\"ids\": [1, 2, 3, 4], \"keep\": [1, 0, 0, 0]}\n"));
  write("more.jsonl", "{\"ids\": [1, 2, 3, 4, 5]}\n{\"ids\": [1, 2]}\n");
  options_.inputs.push_back(directory_.path("m*.jsonl"));
  options_.max_tokens = 4;
  options_.held_out = 0.0;
  const TokenizeReport report = tokenize(options_);
  ASSERT_EQ(report.sources.size(), 2U);
  const SourceReport& first = report.sources[0];
  EXPECT_EQ(first.name, options_.inputs[0]);
  EXPECT_EQ(first.files, 2);
  EXPECT_EQ(first.documents, 3);
  EXPECT_EQ(first.tokens, 8);
  EXPECT_EQ(first.kept, 3);
  EXPECT_EQ(first.empty, 1);
  EXPECT_EQ(first.too_long, 0);
  EXPECT_EQ(first.bytes, 12 + 11 + 18 + 43);
  EXPECT_EQ(first.lengths, (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(report.sources[1].documents, 1);
  EXPECT_EQ(report.sources[1].too_long, 1);
  EXPECT_EQ(report.total().tokens, 10);
  EXPECT_EQ(report.total().lengths, (std::vector<std::int64_t>{1, 2, 1}));
  EXPECT_EQ(report.train.tokens, 10);
  const auto json = to_json(report);
  EXPECT_EQ(json["splits"]["train"]["documents"], 4);
  EXPECT_EQ(json["sources"][1]["name"], options_.inputs[1]);
  EXPECT_EQ(json["total"]["lengths"][1],
            nlohmann::ordered_json({{"from", 2}, {"to", 3}, {"documents", 2}}));
  const std::string text = to_text(report);
  EXPECT_NE(text.find("too long"), std::string::npos) << text;
  EXPECT_NE(text.find("2 to          3            1            1            2"), std::string::npos)
      << text;
  EXPECT_EQ(test::read_token_shard(options_.output + "/train-00000.h5").size(), 4U);
}

TEST_F(TokenizeFiles, TheEarliestBadLineIsNamedWhateverTheThreads) {
  write("in/a.jsonl", lines(0, 3000));
  write("in/b.jsonl", lines(0, 1000) + "{\"ids\": [1, 1000]}\n" + lines(0, 500) + "oops\n");
  write("in/c.jsonl", "{\"ids\": 1}\n");
  write("in/d.jsonl.gz", test::gzip("{\"ids\": [1]}\n").substr(0, 15));
  for (const std::size_t threads : {1U, 2U, 6U}) {
    options_.threads = threads;
    EXPECT_EQ(fault(),
              fmt::format(
                  "[document] ids must be from 0 to 999, got 1000: is the vocabulary another one? "
                  "({}:1001)",
                  directory_.path("in/b.jsonl")));
  }
  fs::remove(directory_.path("in/b.jsonl"));
  EXPECT_NE(fault().find("in/c.jsonl:1"), std::string::npos) << fault();
  fs::remove(directory_.path("in/c.jsonl"));
  EXPECT_NE(fault().find("in/d.jsonl.gz:1: the gzip data end in the middle"), std::string::npos)
      << fault();
}

TEST_F(TokenizeFiles, ABadLineBeforeCorruptDataComesFirst) {
  const std::string packed = test::gzip(lines(0, 5) + "oops\n" + lines(5, 5));
  write("in/a.jsonl.gz", packed + "garbage");
  EXPECT_NE(fault().find("in/a.jsonl.gz:6)"), std::string::npos) << fault();
}

TEST_F(TokenizeFiles, IsStoppedAndTellsWhereItStands) {
  write("in/a.jsonl", lines(0, 20000));
  TokenizeProgress latest;
  options_.on_progress = [&](const TokenizeProgress& progress) {
    EXPECT_GE(progress.tokens, latest.tokens);
    latest = progress;
  };
  options_.should_stop = [&] { return latest.documents > 3000; };
  EXPECT_NE(fault().find("stopped before the end"), std::string::npos);
  EXPECT_LT(latest.documents, 20000);
  EXPECT_GT(latest.bytes, 0);
  options_.should_stop = nullptr;
  latest = {};
  tokenize(options_);
  EXPECT_EQ(latest.documents, 20000);
  EXPECT_EQ(latest.files, 1U);
  EXPECT_EQ(latest.bytes, latest.all_bytes);
}

TEST_F(TokenizeFiles, TemplatesAreAskedForOnlyByMessages) {
  options_.tokenizer = directory_.path("tokenizer/tokenizer.json");
  write("tokenizer/tokenizer.json", RegisterVocabulary().tokenizer_json());
  write("in/a.jsonl",
        "{\"text\": \"step #3\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"r2\"}]}\n");
  const std::string text = fault();
  EXPECT_NE(text.find("messages need --chat-template"), std::string::npos) << text;
  EXPECT_NE(text.find("in/a.jsonl:2"), std::string::npos) << text;
  options_.chat_template = "cuneiform";
  EXPECT_NE(fault().find("chatml"), std::string::npos) << fault();
  options_.chat_template = "";
  options_.form = "poem";
  EXPECT_NE(fault().find("form poem is not known"), std::string::npos) << fault();
  options_.form = "text";
  options_.end_token = "<no>";
  EXPECT_NE(fault().find("has no token <no>"), std::string::npos) << fault();
  write("in/a.jsonl", "{\"text\": \"step #3\"}\n{\"text\": \" \"}\n");
  options_.end_token = "<pad>";
  options_.held_out = 0.0;
  const TokenizeReport report = tokenize(options_);
  EXPECT_EQ(report.sources[0].empty, 1);
  EXPECT_EQ(test::read_token_shard(options_.output + "/train-00000.h5")[0].ids,
            (std::vector<std::int32_t>{87, 23, RegisterVocabulary().pad()}));
}

TEST_F(TokenizeFiles, OptionsOutOfRangeAreRefused) {
  write("in/a.jsonl", lines(0, 3));
  const auto refused = [&](const std::function<void(TokenizeOptions&)>& change) {
    const TokenizeOptions before = options_;
    change(options_);
    const std::string text = fault();
    options_ = before;
    return text;
  };
  EXPECT_NE(refused([](auto& o) { o.held_out = 1.5; }).find("from 0 to 1"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.shard_tokens = 0; }).find("at least one token"),
            std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.max_tokens = -1; }).find("cannot be -1"), std::string::npos);
  EXPECT_NE(refused([](auto& o) { o.inputs = {o.output + "x"}; }).find("no file"),
            std::string::npos);
}

}  // namespace
}  // namespace bifocal
