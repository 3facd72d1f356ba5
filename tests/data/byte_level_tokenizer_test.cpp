// Byte-level tokenizers against what the `tokenizers` package makes of the same files
// (tests/data/tokenizers/make_tokenizers.py), and what holds for any text.
#include "data/byte_level_tokenizer.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/random.h"
#include "data/tokenizer.h"
#include "data/utf8.h"

namespace bifocal {
namespace {

using Ids = std::vector<std::int32_t>;
using Json = nlohmann::json;

const std::string kDirectory = BIFOCAL_SOURCE_DIR "/tests/data/tokenizers/";

// Read once for all tests.
const Tokenizer& tokenizer(std::string_view name) {
  static std::map<std::string, std::unique_ptr<Tokenizer>> read;
  const std::string key(name);
  std::unique_ptr<Tokenizer>& found = read[key];
  if (!found) {
    found = read_tokenizer(kDirectory + key);
  }
  return *found;
}

std::vector<Json> cases() {
  std::ifstream file(kDirectory + "cases.jsonl");
  std::vector<Json> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(Json::parse(line));
  }
  return lines;
}

std::string streamed(const Tokenizer& tokenizer, const Ids& ids, bool skip_special) {
  TextStream stream(tokenizer, skip_special);
  std::string text;
  for (const std::int32_t id : ids) {
    const std::string shown = stream.append(id);
    EXPECT_EQ(find_invalid_utf8(shown), std::nullopt);
    text += shown;
  }
  return text + stream.finish();
}

void append_utf8(char32_t code, std::string& text) {
  const auto put = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0U | (code >> 6U));
  } else if (code < 0x10000) {
    put(0xE0U | (code >> 12U));
    put(0x80U | ((code >> 6U) & 0x3FU));
  } else {
    put(0xF0U | (code >> 18U));
    put(0x80U | ((code >> 12U) & 0x3FU));
    put(0x80U | ((code >> 6U) & 0x3FU));
  }
  if (code >= 0x80) {
    put(0x80U | (code & 0x3FU));
  }
}

// Text of one seed: any code points, mixed with parts that have tokens of their own.
std::string random_text(std::uint64_t seed) {
  static const std::vector<std::string> parts{" the",
                                              "model",
                                              " ",
                                              "\n",
                                              "<|im_end|>",
                                              "<|eot_id|>",
                                              "12",
                                              "'s",
                                              "\r\n",
                                              "\u0301",
                                              "\u00e9"};
  std::uint64_t index = 0;
  const auto next = [&] { return random_bits(seed, 0, index++); };
  std::string text;
  const std::uint64_t count = next() % 80;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t kind = next() % 4;
    const std::uint64_t limit = kind == 1 ? 0x300 : (kind == 2 ? 0x3100 : 0x110000);
    const auto code = static_cast<char32_t>(next() % limit);
    if (kind == 0 || (code >= 0xD800 && code < 0xE000)) {
      text += parts[next() % parts.size()];
    } else {
      append_utf8(code, text);
    }
  }
  return text;
}

TEST(ByteLevelTokenizer, GivesTheIdsAndTextsOfTheLibrary) {
  std::map<std::string, int> counts;
  for (const Json& line : cases()) {
    const auto name = line["tokenizer"].get<std::string>();
    const Tokenizer& tested = tokenizer(name);
    const Ids ids = line["ids"].get<Ids>();
    if (line.contains("text")) {
      EXPECT_EQ(tested.encode(line["text"].get<std::string>()), ids) << line.dump();
    }
    const auto decoded = line.value(line.contains("decoded") ? "decoded" : "text", "");
    EXPECT_EQ(tested.decode(ids, false), decoded) << line.dump();
    EXPECT_EQ(streamed(tested, ids, false), decoded) << line.dump();
    const auto skipped = line.value("skipped", decoded);
    EXPECT_EQ(tested.decode(ids, true), skipped) << line.dump();
    EXPECT_EQ(streamed(tested, ids, true), skipped) << line.dump();
    ++counts[name];
  }
  EXPECT_EQ(counts.size(), 6U);
  for (const auto& [name, count] : counts) {
    EXPECT_GT(count, 150) << name;
  }
}

TEST(ByteLevelTokenizer, DecodingGivesTheNormalizedTextAndEndsCutIt) {
  for (const char* name : {"qwen", "smollm2", "llama3"}) {
    const Tokenizer& tested = tokenizer(name);
    for (std::uint64_t seed = 0; seed < 500; ++seed) {
      const std::string text = random_text(seed);
      const std::string normal = tested.normalize(text);
      const Encoding encoding = tested.encode_with_ends(text);
      EXPECT_EQ(tested.decode(encoding.ids, false), normal) << name << seed;
      EXPECT_EQ(tested.normalize(normal), normal) << name << seed;
      EXPECT_EQ(tested.encode(normal), encoding.ids) << name << seed;
      ASSERT_EQ(encoding.ends.size(), encoding.ids.size());
      std::int64_t begin = 0;
      for (std::size_t i = 0; i < encoding.ids.size(); ++i) {
        const auto bytes = static_cast<std::size_t>(encoding.ends[i] - begin);
        ASSERT_GT(encoding.ends[i], begin);
        EXPECT_EQ(normal.substr(static_cast<std::size_t>(begin), bytes),
                  tested.piece(encoding.ids[i], i == 0));
        begin = encoding.ends[i];
      }
      EXPECT_EQ(begin, static_cast<std::int64_t>(normal.size()));
    }
  }
}

TEST(ByteLevelTokenizer, EndsCountWhatNoTokenStandsFor) {
  // A space that was put first is no byte of the text; white space goes to the token that takes it.
  const Encoding spaced = tokenizer("gpt2").encode_with_ends("the <mask>");
  EXPECT_EQ(spaced.ends.back(), 10);
  EXPECT_EQ(tokenizer("gpt2").decode(spaced.ids, false), " the<mask>");
  // Bytes without a token, at the end as well.
  const Tokenizer& dropped = tokenizer("dropped");
  std::string all;
  for (char32_t code = 0; code < 0x100; ++code) {
    append_utf8(code, all);
  }
  const Encoding encoding = dropped.encode_with_ends(all + "the");
  EXPECT_LT(encoding.ids.size(), all.size() - 20);
  EXPECT_TRUE(std::ranges::is_sorted(encoding.ends));
  EXPECT_EQ(encoding.ends.back(), static_cast<std::int64_t>(all.size()) + 3);
}

TEST(ByteLevelTokenizer, KnowsItsTokens) {
  const Tokenizer& llama = tokenizer("llama3");
  EXPECT_EQ(llama.vocabulary(), 1809);
  const std::optional<std::int32_t> begin = llama.find("<|begin_of_text|>");
  ASSERT_TRUE(begin.has_value());
  EXPECT_EQ(llama.prefix(), Ids{*begin});
  EXPECT_TRUE(llama.is_special(*begin));
  EXPECT_EQ(llama.find("<|begin_of_"), std::nullopt);
  const std::optional<std::int32_t> word = llama.find("\u0120unreachable");
  ASSERT_TRUE(word.has_value());
  EXPECT_FALSE(llama.is_special(*word));
  EXPECT_EQ(llama.piece(*word, true), " unreachable");
  EXPECT_EQ(llama.encode(" unreachable"), Ids{*word});
  EXPECT_EQ(tokenizer("qwen").prefix(), Ids{});
  EXPECT_FALSE(tokenizer("qwen").is_special(*tokenizer("qwen").find("<think>")));
  EXPECT_EQ(llama.hash(), read_tokenizer(kDirectory + "llama3/tokenizer.json")->hash());
  EXPECT_NE(llama.hash(), tokenizer("qwen").hash());
  for (const std::int32_t outside : {-1, 1809}) {
    EXPECT_THROW(llama.decode(Ids{outside}, false), Error);
    EXPECT_THROW(llama.piece(outside, true), Error);
    EXPECT_THROW(llama.is_special(outside), Error);
  }
}

TEST(ByteLevelTokenizer, TextThatIsNotUtf8IsRefusedWithTheByte) {
  const Tokenizer& tested = tokenizer("qwen");
  for (const char* text :
       {"abc\xFFx", "abc\xE9", "abc\xED\xA0\x80", "abc\xC0\x80", "abc\xF4\x90\x80\x80"}) {
    for (const auto& use : {std::function([&] { tested.encode(text); }),
                            std::function([&] { tested.normalize(text); })}) {
      try {
        use();
        ADD_FAILURE() << "accepted";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("byte 3 "), std::string::npos) << error.what();
      }
    }
  }
}

TEST(ByteLevelTokenizer, LongRunsTakeNoQuadraticTime) {
  const std::size_t length = 1 << 18;
  for (const char* name : {"qwen", "llama3", "smollm2"}) {
    const Tokenizer& tested = tokenizer(name);
    for (const char* part : {"a", " ", "\n", "=-", "\u8a18", "\u0301", "\u0301\u0323"}) {
      std::string text;
      while (text.size() < length) {
        text += part;
      }
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(tested.decode(tested.encode(text), false), tested.normalize(text));
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      EXPECT_LT(time.count(), 10.0) << name << " " << part;  // quadratic: minutes
    }
  }
}

TEST(ByteLevelTokenizer, ManyThreadsEncodeAtOnce) {
  std::vector<std::string> texts;
  std::vector<Ids> wanted;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    texts.push_back(random_text(seed));
    wanted.push_back(tokenizer("qwen").encode(texts.back()));
    wanted.push_back(tokenizer("llama3").encode(texts.back()));
  }
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  const Tokenizer& qwen = tokenizer("qwen");
  const Tokenizer& llama = tokenizer("llama3");
  for (int& count : wrong) {
    threads.emplace_back([&] {
      for (std::size_t i = 0; i < texts.size(); ++i) {
        count += qwen.encode(texts[i]) == wanted[2 * i] ? 0 : 1;
        count += llama.encode(texts[i]) == wanted[2 * i + 1] ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

TEST(ByteLevelTokenizer, StreamsHoldCutCharactersBack) {
  const Tokenizer& tested = tokenizer("qwen");
  const Ids ids = tested.encode("a\U0001d7d8b");
  ASSERT_GT(ids.size(), 4U);  // the character is no token
  TextStream stream(tested, false);
  EXPECT_EQ(stream.append(ids[0]), "a");
  EXPECT_EQ(stream.append(ids[1]), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
  TextStream specials(tested, true);
  EXPECT_EQ(specials.append(*tested.find("<|im_end|>")), "");
  EXPECT_EQ(specials.append(*tested.find("<think>")), "<think>");
}

}  // namespace
}  // namespace bifocal
