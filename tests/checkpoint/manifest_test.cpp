// The manifest's text: its checksum, its fields, and what a reader refuses.
#include "checkpoint/manifest.h"

#include <functional>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/sha256.h"

namespace bifocal {

namespace {

Manifest example() {
  Manifest manifest;
  manifest.info = {30, "align", 30, 240, "hash", "a = \"\xc3\xa9\"\n", "{}"};
  manifest.ranks = 2;
  manifest.files = {{"rank_00000.h5", 100, "aa"}, {"rank_00001.h5", 200, "bb"}};
  manifest.tensors = {{"w", DType::f32, {2, 3}, {{0, 0, 4, {{40, 20, 0xdeadbeefU}}}, {1, 4, 6}}},
                      {"x", DType::f64, {0}, {}}};
  return manifest;
}

std::string refusal(const std::function<void(Manifest&)>& change) {
  Manifest manifest = example();
  change(manifest);
  try {
    parse_manifest(to_text(manifest), "here/manifest.json");
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

TEST(Manifest, ComesBackFromItsText) {
  const Manifest manifest = parse_manifest(to_text(example()), "m");
  EXPECT_EQ(manifest.info.stage, "align");
  EXPECT_EQ(manifest.info.configuration, example().info.configuration);
  ASSERT_EQ(manifest.files.size(), 2U);
  EXPECT_EQ(manifest.files[1].bytes, 200);
  ASSERT_EQ(manifest.tensors.size(), 2U);
  EXPECT_EQ(manifest.tensors[0].shape, (Shape{2, 3}));
  EXPECT_EQ(manifest.tensors[0].parts[1].end, 6);
  EXPECT_TRUE(manifest.tensors[0].parts[1].chunks.empty());
  ASSERT_EQ(manifest.tensors[0].parts[0].chunks.size(), 1U);
  EXPECT_EQ(manifest.tensors[0].parts[0].chunks[0].offset, 40);
  EXPECT_EQ(manifest.tensors[0].parts[0].chunks[0].bytes, 20);
  EXPECT_EQ(manifest.tensors[0].parts[0].chunks[0].crc32, 0xdeadbeefU);
  EXPECT_EQ(manifest.tensors[1].dtype, DType::f64);
  EXPECT_EQ(to_text(manifest), to_text(example()));
}

TEST(Manifest, ChecksumIsTheHashOfTheTextWithoutIt) {
  const std::string text = to_text(example());
  const auto json = nlohmann::json::parse(text);
  const auto checksum = json.at("checksum").get<std::string>();
  const std::string field = ",\n \"checksum\": \"" + checksum + "\"";
  std::string rest = text;
  rest.erase(rest.find(field), field.size());
  EXPECT_EQ(sha256_hex(rest), checksum);
  EXPECT_EQ(nlohmann::json::parse(rest).at("configuration_sha256"),
            sha256_hex(example().info.configuration));
}

TEST(Manifest, AFlippedBitAnywhereIsSeen) {
  const std::string text = to_text(example());
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string flipped = text;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
    try {
      parse_manifest(flipped, "here/manifest.json");
      ADD_FAILURE() << "byte " << at;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("here/manifest.json"), std::string::npos)
          << error.what();
    }
  }
}

TEST(Manifest, FileNamesMayNotLeadElsewhere) {
  for (const std::string name : {"../rank_00000.h5", "/etc/passwd", "a/b", "..", ".", "", "a\\b"}) {
    const std::string error = refusal([&](Manifest& m) { m.files[0].name = name; });
    EXPECT_NE(error.find("without a path"), std::string::npos) << name << ": " << error;
    EXPECT_NE(error.find("here/manifest.json"), std::string::npos) << error;
  }
}

TEST(Manifest, RefusesPartsThatDoNotFit) {
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[0].parts[0].file = 2; }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[0].parts[0].file = -1; }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[0].parts[1].begin = 5; }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[0].parts[1].end = 7; }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[0].parts.pop_back(); }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[1].name = m.tensors[0].name; }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[1].name.append("/b"); }), "");
  EXPECT_NE(refusal([](Manifest& m) { m.tensors[1].dtype = DType::bf16; }), "");
}

TEST(Manifest, RefusesChunksOutsideTheirFile) {
  const auto with_chunk = [](std::int64_t offset, std::int64_t bytes) {
    return refusal([&](Manifest& m) { m.tensors[0].parts[0].chunks = {{offset, bytes, 1}}; });
  };
  EXPECT_EQ(with_chunk(80, 20), "");
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  for (const auto& [offset, bytes] : {std::pair<std::int64_t, std::int64_t>{81, 20},
                                      {-1, 20},
                                      {0, 0},
                                      {0, 101},
                                      {kMost, 20},
                                      {20, kMost},
                                      {20, -1}}) {
    EXPECT_NE(with_chunk(offset, bytes).find("tensor w has a chunk"), std::string::npos)
        << offset << " " << bytes;
  }
}

TEST(Manifest, RefusesTextThatIsNoManifest) {
  for (const char* text : {"", "[]", "{}", "null", "{\"format\": \"bifocal checkpoint\"}", "{"}) {
    EXPECT_THROW(parse_manifest(text, "m"), Error) << text;
  }
}

TEST(Manifest, ConfigurationThatIsNoTextIsRefused) {
  Manifest manifest = example();
  manifest.info.configuration.append("\xff");
  EXPECT_THROW(to_text(manifest), Error);
}

}  // namespace bifocal
