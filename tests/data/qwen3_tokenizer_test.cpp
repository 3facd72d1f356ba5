// The tokenizer of Qwen3 on texts whose ids another implementation made. The texts are not ours to
// ship: BIFOCAL_QWEN3_TOKENIZER names a directory with tokenizer.json and golden_js.jsonl
// ({"text", "ids"} a line); this repository has their hashes.
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iostream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/sha256.h"
#include "data/tokenizer.h"

namespace bifocal {
namespace {

using Ids = std::vector<std::int32_t>;

std::string hash_of(const Ids& ids) {
  Sha256 hash;
  hash.add(ids.data(), ids.size() * sizeof(std::int32_t));
  return hash.hex();
}

class Qwen3Tokenizer : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* directory = std::getenv("BIFOCAL_QWEN3_TOKENIZER");
    if (directory == nullptr) {
      GTEST_SKIP() << "BIFOCAL_QWEN3_TOKENIZER names no directory";
    }
    directory_ = directory;
  }

  std::string directory_;
};

TEST_F(Qwen3Tokenizer, GivesTheRecordedIds) {
  std::ifstream hashes(BIFOCAL_SOURCE_DIR "/tests/data/qwen3_hashes.txt");
  std::string hash;
  ASSERT_TRUE(std::getline(hashes, hash));
  ASSERT_EQ(sha256_hex_of_file(directory_ + "/tokenizer.json"), hash) << "another tokenizer";
  const std::unique_ptr<Tokenizer> tokenizer = read_tokenizer(directory_);
  EXPECT_EQ(tokenizer->vocabulary(), 151'669);
  std::ifstream golden(directory_ + "/golden_js.jsonl");
  int count = 0;
  for (std::string line; std::getline(golden, line); ++count) {
    const auto json = nlohmann::json::parse(line);
    const auto text = json["text"].get<std::string>();
    const Ids ids = tokenizer->encode(text);
    EXPECT_EQ(ids, json["ids"].get<Ids>()) << text;
    ASSERT_TRUE(std::getline(hashes, hash)) << count;
    EXPECT_EQ(hash_of(ids), hash) << text;
    EXPECT_EQ(tokenizer->decode(ids, false), tokenizer->normalize(text)) << text;
  }
  EXPECT_FALSE(std::getline(hashes, hash));
  EXPECT_EQ(count, 386);
}

// BIFOCAL_TOKENIZER_TEXT names a file of any text, long enough to time; its speed in processor time
// is printed.
TEST_F(Qwen3Tokenizer, Speed) {
  const char* file = std::getenv("BIFOCAL_TOKENIZER_TEXT");
  if (file == nullptr) {
    GTEST_SKIP() << "BIFOCAL_TOKENIZER_TEXT names no file";
  }
  std::ifstream stream(file, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  ASSERT_FALSE(text.empty());
  const std::unique_ptr<Tokenizer> tokenizer = read_tokenizer(directory_);
  const std::clock_t start = std::clock();
  const Ids ids = tokenizer->encode(text);
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  const double speed = 1e-6 * static_cast<double>(text.size()) / seconds;  // MB/s
  std::cout << fmt::format("{} bytes, {} tokens, {:.1f} MB/s\n", text.size(), ids.size(), speed);
  EXPECT_GE(speed, 2.0);
  EXPECT_EQ(tokenizer->decode(ids, false), tokenizer->normalize(text));
}

}  // namespace
}  // namespace bifocal
