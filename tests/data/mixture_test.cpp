// Mixture files: what they say, and what is refused.
#include "data/mixture.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

constexpr const char* kTwo = R"([[source]]
name = "chat"
paths = ["../shards/chat", "/data/more.h5"]
weight = 40

[[source]]
name = "code"
paths = "code"
weight = 0.5
)";

std::string fault(const std::string& text) {
  return test::error_of([&] { parse_mixture(text, "FILE", "dir"); });
}

TEST(Mixture, ReadsSourcesWithPathsRelativeToTheFile) {
  const Mixture mixture = parse_mixture(kTwo, "FILE", "runs/mixtures");
  ASSERT_EQ(mixture.sources.size(), 2U);
  EXPECT_EQ(mixture.sources[0].name, "chat");
  EXPECT_EQ(mixture.sources[0].paths,
            (std::vector<std::string>{"runs/shards/chat", "/data/more.h5"}));
  EXPECT_EQ(mixture.sources[0].weight, 40.0);
  EXPECT_EQ(mixture.sources[1].paths, (std::vector<std::string>{"runs/mixtures/code"}));
  EXPECT_EQ(mixture.sources[1].weight, 0.5);
}

TEST(Mixture, WhatIsNoTomlIsRefused) {
  for (const char* text : {"[?]", "\xc3\xa9 = 1", "[[source"}) {
    EXPECT_NE(fault(text).find("FILE"), std::string::npos) << text << "\n" << fault(text);
  }
}

TEST(Mixture, ReadsAFile) {
  const test::TemporaryDirectory directory;
  write_file_atomically(directory.path("a.h5"), "");
  write_file_atomically(directory.path("mixture.toml"),
                        "[[source]]\nname = \"a\"\npaths = \"a.h5\"\nweight = 1\n");
  EXPECT_EQ(read_mixture(directory.path("mixture.toml")).sources[0].paths[0],
            directory.path("a.h5"));
  write_file_atomically(directory.path("mixture.toml"),
                        "[[source]]\nname = \"a\"\npaths = \"b.h5\"\nweight = 1\n");
  try {
    read_mixture(directory.path("mixture.toml"));
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("source a of"), std::string::npos) << text;
    EXPECT_NE(text.find("b.h5, which does not exist"), std::string::npos) << text;
  }
  EXPECT_THROW(read_mixture(directory.path("none.toml")), Error);
}

TEST(Mixture, TheShippedMixtureHasTheArticlesWeights) {
  const std::string path = BIFOCAL_SOURCE_DIR "/data/mixtures/article.toml";
  const Mixture mixture = parse_mixture(read_file(path), path, ".");
  std::vector<std::pair<std::string, double>> weights;
  for (const MixtureSource& source : mixture.sources) {
    weights.emplace_back(source.name, source.weight);
  }
  EXPECT_EQ(weights,
            (std::vector<std::pair<std::string, double>>{
                {"chat", 40}, {"code", 20}, {"math", 20}, {"science", 15}, {"safety", 5}}));
}

TEST(Mixture, WhatCannotBeAMixtureIsRefused) {
  const std::string name = "name = \"a\"\n";
  const std::string paths = "paths = \"b\"\n";
  const std::string weight = "weight = 1\n";
  const std::string source = "[[source]]\n";
  EXPECT_EQ(fault(source + name + paths + weight), "");
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "FILE names no source"},
      {"source = []", "FILE names no source"},
      {"[source]\n" + name, "FILE names no source"},
      {"source = [1]", "FILE names no source"},
      {"= 3", "wanted a TOML file, got"},
      {"seed = 3\n" + source + name + paths + weight, "unknown key seed (FILE, line 1)"},
      {source + name + paths + weight + "long = \"cut\"", "unknown key long (FILE, line 5)"},
      {source + paths + weight, "a source has no name (FILE, line 1)"},
      {source + name + weight, "a source has no paths"},
      {source + name + paths, "a source has no weight"},
      {source + name + name + paths + weight, "wanted a TOML file, got"},
      {source + "name = 3\n" + paths + weight, "name of a source: wanted a text"},
      {source + "name = \"\"\n" + paths + weight, "got an empty one (FILE, line 2)"},
      {source + name + "paths = []\n" + weight, "got an empty list (FILE, line 3)"},
      {source + name + "paths = [\"x\", 1]\n" + weight, "got a value of TOML type integer"},
      {source + name + "paths = [\"\"]\n" + weight, "paths of a source: wanted a text"},
      {source + name + paths + "weight = -1", "wanted a number of at least 0, got -1"},
      {source + name + paths + "weight = nan", "wanted a number of at least 0, got nan"},
      {source + name + paths + "weight = inf", "wanted a number of at least 0, got inf"},
      {source + name + paths + "weight = \"1\"", "weight of a source: wanted a number, got"},
      {source + name + paths + "weight = 0", "the weights in FILE sum to 0"},
      {source + name + paths + weight + source + name + paths + weight,
       "two sources have the name a (FILE, line 5)"},
  };
  for (const auto& [text, wanted] : cases) {
    EXPECT_NE(fault(text).find(wanted), std::string::npos) << text << "\n" << fault(text);
  }
}

TEST(Mixture, CanonicalTextTellsMixturesApart) {
  const auto text = [](const std::string& toml) {
    return canonical_text(parse_mixture(toml, "FILE", "dir"));
  };
  const std::string base = kTwo;
  EXPECT_EQ(text(base), text("# a comment\n" + base));
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"40", "41"}, {"0.5", "0.50001"}, {"\"chat\"", "\"chats\""}, {"more.h5", "less.h5"}}) {
    std::string changed = base;
    changed.replace(changed.find(from), from.size(), to);
    EXPECT_NE(text(base), text(changed)) << to;
  }
}

}  // namespace
}  // namespace bifocal
