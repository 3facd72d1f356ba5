// Console on and off a terminal, JSON lines, formats.
#include "core/log.h"

#include <array>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <limits>
#include <sstream>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace bifocal {
namespace {

std::string contents(std::FILE* file) {
  std::rewind(file);
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
    text += static_cast<char>(c);
  }
  return text;
}

TEST(Console, WritesPlainLinesOnlyWhereThereIsNoTerminal) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  {
    Console console(true, file);
    EXPECT_FALSE(console.is_terminal());
    console.print("start");
    console.live("step 1");
    console.plain("step 1 of 2");
  }
  EXPECT_EQ(contents(file), "start\nstep 1 of 2\n");
  std::fclose(file);
}

TEST(Console, OtherRanksAreSilent) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  Console console(false, file);
  console.print("start");
  console.plain("step");
  EXPECT_EQ(contents(file), "");
  std::fclose(file);
}

TEST(Console, RewritesOneLiveLineOnATerminal) {
  const int master = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(master, 0);
  ASSERT_EQ(grantpt(master), 0);
  ASSERT_EQ(unlockpt(master), 0);
  std::FILE* terminal = std::fopen(ptsname(master), "w");
  ASSERT_NE(terminal, nullptr);
  const winsize size{.ws_row = 5, .ws_col = 7, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(ioctl(master, TIOCSWINSZ, &size), 0);
  {
    Console console(true, terminal);
    EXPECT_TRUE(console.is_terminal());
    console.live("1234567890");
    console.plain("not here");
    console.live("two");
    console.print("kept");
    console.live("end");
  }
  std::fclose(terminal);
  // The kernel hands the bytes over in pieces; with the writer gone, reading ends in an error.
  std::string text;
  std::array<char, 64> piece{};
  for (ssize_t count = 0; count >= 0;) {
    text.append(piece.data(), static_cast<std::size_t>(count));
    count = read(master, piece.data(), piece.size());
  }
  EXPECT_EQ(text, "123456\r\x1b[Ktwo\r\x1b[Kkept\r\nend\r\n");
  close(master);
}

TEST(JsonLines, AppendsOneObjectALine) {
  const auto path =
      std::filesystem::temp_directory_path() / fmt::format("bifocal_log_test_{}.jsonl", getpid());
  JsonLines(path.string()).write({{"step", 1}, {"loss", 0.5}});
  JsonLines lines(path.string());
  lines.write({{"step", 2}, {"loss", std::numeric_limits<double>::quiet_NaN()}});
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(text.str(), "{\"step\":1,\"loss\":0.5}\n{\"step\":2,\"loss\":null}\n");
  std::filesystem::remove(path);
}

TEST(JsonLines, AFileThatCannotBeOpenedIsAnError) {
  EXPECT_THROW(JsonLines("no/such/directory/metrics.jsonl"), Error);
}

TEST(Format, CountsRatesAndDurations) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(1234567), "1,234,567");
  EXPECT_EQ(format_count(-123456), "-123,456");
  EXPECT_EQ(format_tokens_per_second(5011.6), "5,012 tokens/s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(59.6), "1m00s");
  EXPECT_EQ(format_duration(125), "2m05s");
  EXPECT_EQ(format_duration(3 * 3600 + 7 * 60 + 1), "3h07m");
  EXPECT_EQ(format_duration(86400 * 2 + 3600 * 4), "2d04h");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "-");
}

}  // namespace
}  // namespace bifocal
