// Lines of JSON: values, refusals, and what their errors name.
#include "data/json_lines.h"

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "support/compress.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

using test::error_of;

TEST(JsonLines, BadLinesNameTheByteAndStayShort) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{\"a\": 1", "byte 8: wanted a JSON value: syntax error"},
      {"{\"a\": 1} x", "byte 10: wanted a JSON value"},
      {"{\"a\": \"\xc3\x28\"}", "byte 8: wanted UTF-8, got 0xc3"},
      {"{\"a\": \"\\ud800\"}", "surrogate"},
      {"{\"a\": \"\\q\"}", "forbidden character"},
      {std::string("{\"a\": \"\0\"}", 10), "control character"},
      {"{\"a\": 1e999}", "number overflow"},
      {"", "unexpected end of input"},
      {"nan", "invalid literal"},
      {"{\"a\": \"" + std::string(100000, 'x'), ".."},
  };
  for (const auto& [line, wanted] : cases) {
    const std::string fault = error_of([&] { parse_json_line(line); });
    EXPECT_TRUE(fault.starts_with("[json_lines] ")) << fault;
    EXPECT_NE(fault.find(wanted), std::string::npos) << fault;
    EXPECT_LT(fault.size(), 400U);
  }
}

TEST(JsonLines, DeepNestingIsHarmless) {
  const std::string deep(1000000, '[');
  EXPECT_NE(error_of([&] { parse_json_line(deep); }), "");
  const auto value = parse_json_line(deep + std::string(deep.size(), ']'));
  EXPECT_NE(error_of([&] { int32_array(value); }).find("got array"), std::string::npos);
}

TEST(JsonLines, IntegersMustFit32Bits) {
  EXPECT_EQ(int32_array(parse_json_line("[0, -2147483648, 2147483647]")),
            (std::vector<std::int32_t>{0, -2147483647 - 1, 2147483647}));
  for (const char* array : {"[2147483648]",
                            "[-2147483649]",
                            "[18446744073709551615]",
                            "[1.0]",
                            "[true]",
                            "[\"1\"]",
                            "[null]",
                            "[[1]]",
                            "{}",
                            "1"}) {
    EXPECT_NE(error_of([&] { int32_array(parse_json_line(array)); }), "") << array;
  }
}

TEST(JsonLines, VisitsLinesThatAreNotBlankAndNamesTheirNumbers) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("in.jsonl");
  write_file_atomically(path,
                        test::zstd("\xef\xbb\xbf"
                                   "1\r\n\n \t\r\n2\n[3"));
  std::vector<std::int64_t> seen;
  const std::string fault = error_of([&] {
    for_each_json_line(
        path, [&](const nlohmann::json& value) { seen.push_back(value.get<std::int64_t>()); });
  });
  EXPECT_EQ(seen, (std::vector<std::int64_t>{1, 2}));
  EXPECT_NE(fault.find(fmt::format("({}:5)", path)), std::string::npos) << fault;
  write_file_atomically(path, "\"text\"\n");
  const std::string type = error_of([&] {
    for_each_json_line(
        path, [&](const nlohmann::json& value) { seen.push_back(value.get<std::int64_t>()); });
  });
  EXPECT_NE(type.find(fmt::format("({}:1)", path)), std::string::npos) << type;
}

}  // namespace
}  // namespace bifocal
