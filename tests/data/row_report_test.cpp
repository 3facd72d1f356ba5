// The report on rows.
#include "data/row_report.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "data/token_file.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

void write(const std::string& path, const std::vector<std::size_t>& lengths) {
  TokenFileWriter writer({100, vocabulary_hash(100), Split::train});
  for (const std::size_t length : lengths) {
    writer.append(std::vector<std::int32_t>(length, 5), std::vector<std::uint8_t>(length, 1));
  }
  writer.write(path);
}

TEST(RowReport, CountsSourcesRowsAndPadding) {
  const test::TemporaryDirectory directory;
  write(directory.path("a.h5"), {1, 2, 3, 40, 40});
  write(directory.path("b.h5"), std::vector<std::size_t>(100, 10));
  const RowSource source({.mixture = {{{"small", {directory.path("a.h5")}, 1},
                                       {"large", {directory.path("b.h5")}, 3}}},
                          .row_tokens = 32,
                          .vocabulary = 100});
  const RowReport report = report_rows(source, 32, 20);
  EXPECT_EQ(report.counts.rows, 20);
  EXPECT_EQ(report.counts.tokens() + report.counts.padding, 20 * 32);
  EXPECT_GT(report.largest_padding, 0);
  EXPECT_LE(report.largest_padding, 32);
  EXPECT_LT(report.without_repeats, 20);
  ASSERT_EQ(report.sources.size(), 2U);
  EXPECT_EQ(report.sources[0].lengths, (std::vector<std::int64_t>{1, 2, 0, 0, 0, 2}));
  EXPECT_EQ(report.sources[1].lengths, (std::vector<std::int64_t>{0, 0, 0, 100}));
  EXPECT_EQ(report.sources[0].size.tokens, 86);
  EXPECT_GE(report.sources[0].counts.cut, 2);

  const nlohmann::ordered_json json = to_json(report);
  EXPECT_EQ(json["tokens"], report.counts.tokens());
  EXPECT_EQ(json["padding_tokens"], report.counts.padding);
  EXPECT_EQ(json["sources"][1]["name"], "large");
  EXPECT_EQ(json["sources"][1]["weight"], 0.75);
  EXPECT_EQ(json["sources"][1]["documents_by_power_of_two"][3], 100);
  EXPECT_NEAR(json["sources"][0]["epochs"].get<double>(),
              static_cast<double>(report.sources[0].counts.tokens) / 86.0,
              1e-12);
  const std::string text = to_text(report);
  for (const char* part : {"20 rows of 32 tokens", "small", "75.00 %", "32 to 63", "come again"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

TEST(RowReport, SaysWhenNothingRepeats) {
  const test::TemporaryDirectory directory;
  write(directory.path("b.h5"), std::vector<std::size_t>(100, 8));
  const RowSource source(
      {.mixture = {{{"all", {directory.path("b.h5")}, 1}}}, .row_tokens = 32, .vocabulary = 100});
  const RowReport report = report_rows(source, 32, 25);
  EXPECT_EQ(report.without_repeats, 25);
  EXPECT_EQ(report.full_rows, 25);
  EXPECT_EQ(report.pieces, 100);
  EXPECT_EQ(to_json(report)["sources"][0]["epochs"], 1.0);
  EXPECT_NE(to_text(report).find("no document comes twice"), std::string::npos);
  EXPECT_EQ(report_rows(source, 32, 26).without_repeats, 25);
}

// A row's last tokens stay free while the next epoch's documents are already looked at: none of
// them counts before it lies in a row.
TEST(RowReport, AnEpochBeginsWithItsFirstPiece) {
  const test::TemporaryDirectory directory;
  write(directory.path("a.h5"), std::vector<std::size_t>(100, 7));
  const RowSource source(
      {.mixture = {{{"all", {directory.path("a.h5")}, 1}}}, .row_tokens = 32, .vocabulary = 100});
  const RowReport report = report_rows(source, 32, 25);  // four documents and 4 tokens of padding
  EXPECT_EQ(report.pieces, 100);
  EXPECT_EQ(report.without_repeats, 25);
  EXPECT_EQ(report_rows(source, 32, 26).without_repeats, 25);
}

}  // namespace
}  // namespace bifocal
