// Finding of text files, decompression and lines.
#include "data/text_source.h"

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "support/compress.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

using test::error_of;

class TextSource : public testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& bytes) const {
    const fs::path path = directory_.path(name);
    fs::create_directories(path.parent_path());
    write_file_atomically(path, bytes);
    return path.string();
  }

  Lines lines_of(const std::string& bytes) const {
    LineReader reader(write("file", bytes));
    Lines lines;
    std::string line;
    while (reader.next(line)) {
      lines.push_back(line);
      EXPECT_EQ(reader.number(), static_cast<std::int64_t>(lines.size()));
    }
    EXPECT_FALSE(reader.next(line));
    EXPECT_EQ(reader.bytes_read(), static_cast<std::int64_t>(bytes.size()));
    return lines;
  }

  // The error of reading all lines, and how many came before it.
  std::pair<std::string, std::size_t> fault_in(const std::string& bytes) const {
    const std::string path = write("file", bytes);
    std::size_t count = 0;
    const std::string fault = error_of([&] {
      LineReader reader(path);
      for (std::string line; reader.next(line);) {
        ++count;
      }
    });
    return {fault, count};
  }

  // Paths found, relative to the directory.
  Lines found(const Lines& words) const {
    Lines paths;
    for (const TextFile& file : find_text_files(words)) {
      paths.push_back(fs::relative(file.path, directory_.path()).string());
      EXPECT_EQ(file.bytes, static_cast<std::int64_t>(fs::file_size(file.path)));
    }
    return paths;
  }

  test::TemporaryDirectory directory_;
};

// Lines of random lengths, some longer than the reader's buffers, that compress badly.
std::string many_lines(std::int64_t count) {
  std::string text;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto length =
        i % 50 == 49 ? 600000U : random_below(3000, 1, 0, static_cast<std::uint64_t>(i));
    for (std::uint64_t at = 0; at < length; at += 8) {
      text += fmt::format(
          "{:08x}", random_below(std::uint64_t{1} << 32U, 2, static_cast<std::uint64_t>(i), at));
    }
    text += '\n';
  }
  return text;
}

Lines split(const std::string& text) {
  Lines lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

TEST_F(TextSource, CutsLines) {
  EXPECT_EQ(lines_of(""), Lines{});
  EXPECT_EQ(lines_of("\n"), Lines{""});
  EXPECT_EQ(lines_of("a\nb"), (Lines{"a", "b"}));
  EXPECT_EQ(lines_of("a\nb\n"), (Lines{"a", "b"}));
  EXPECT_EQ(lines_of("a\r\n\r\nb\rc\r\n"), (Lines{"a", "", "b\rc"}));
  EXPECT_EQ(lines_of("\xef\xbb\xbf"
                     "a\n\xef\xbb\xbf"
                     "b\n"),
            (Lines{"a",
                   "\xef\xbb\xbf"
                   "b"}));
  EXPECT_EQ(lines_of("\xef\xbb\xbf"), Lines{""});
  EXPECT_EQ(lines_of(test::gzip("\xef\xbb\xbf"
                                "a\r\nb")),
            (Lines{"a", "b"}));
}

TEST_F(TextSource, ReadsEachCompressionByItsContent) {
  const std::string text = many_lines(200);
  const Lines wanted = split(text);
  const std::string first = text.substr(0, text.size() / 3);  // cuts a line
  const std::string rest = text.substr(first.size());
  EXPECT_EQ(lines_of(text), wanted);
  EXPECT_EQ(lines_of(test::gzip(text)), wanted);
  EXPECT_EQ(lines_of(test::gzip(first) + test::gzip("") + test::gzip(rest)), wanted);
  EXPECT_EQ(lines_of(test::gzip(text) + std::string(1000, '\0')), wanted);
  EXPECT_EQ(lines_of(test::zstd(text)), wanted);
  EXPECT_EQ(lines_of(test::zstd_skippable("notes") + test::zstd(first) + test::zstd("") +
                     test::zstd_skippable("") + test::zstd(rest) +
                     test::zstd_skippable(std::string(300000, 'x'))),
            wanted);
  EXPECT_EQ(lines_of(test::zstd_skippable("only")), Lines{});
  EXPECT_EQ(lines_of(test::gzip(std::string(5000000, 'a'))), Lines{std::string(5000000, 'a')});
}

TEST_F(TextSource, CutOffAndCorruptDataNameFileAndLine) {
  const std::string text = many_lines(300);
  const std::size_t lines = split(text).size();
  for (const auto& [name, packed] :
       {std::pair{"gzip", test::gzip(text)}, {"zstd", test::zstd(text)}}) {
    for (const std::size_t left :
         {packed.size() - 1, packed.size() - 5, packed.size() / 2, std::size_t{7}}) {
      const auto [fault, count] = fault_in(packed.substr(0, left));
      EXPECT_NE(fault.find(fmt::format("the {} data end in the middle", name)), std::string::npos)
          << fault;
      EXPECT_NE(fault.find(fmt::format("/file:{}:", count + 1)), std::string::npos) << fault;
      EXPECT_LE(count, lines);
      // What came before the cut is delivered but for what the last buffer held.
      EXPECT_GE(static_cast<double>(count + 120),
                static_cast<double>(lines) * static_cast<double>(left) /
                    static_cast<double>(packed.size()));
    }
    std::string flipped = packed;
    flipped[flipped.size() / 2] ^= 0x10;
    const auto [fault, count] = fault_in(flipped);
    EXPECT_NE(fault.find(fmt::format("the {} data are corrupt", name)), std::string::npos) << fault;
    EXPECT_NE(fault.find(fmt::format("/file:{}:", count + 1)), std::string::npos) << fault;
  }
  EXPECT_NE(fault_in(test::gzip("a\n") + "b\n").first.find("no gzip data follow"),
            std::string::npos);
  EXPECT_NE(fault_in(test::gzip("a\n") + std::string("\0\0b", 3)).first.find("no gzip data follow"),
            std::string::npos);
  EXPECT_NE(fault_in(test::zstd("a\n") + "b\n").first.find("zstd data are corrupt"),
            std::string::npos);
  EXPECT_NE(fault_in("\x1f\x8b").first.find("cut off"), std::string::npos);
  EXPECT_NE(fault_in(test::zstd_skippable("abc").substr(0, 9)).first.find("cut off"),
            std::string::npos);
}

TEST_F(TextSource, OtherFormatsAreRefusedByName) {
  for (const auto& [start, name] : {std::pair{"\xfd"
                                              "7zXZ\n",
                                              "xz"},
                                    {"BZh91AY", "bzip2"},
                                    {"PK\x03\x04", "zip"},
                                    {"PAR1", "Parquet"},
                                    {"\xff\xfe"
                                     "a",
                                     "UTF-16"}}) {
    const std::string fault = fault_in(start).first;
    EXPECT_NE(fault.find(fmt::format("/file is {}: only UTF-8", name)), std::string::npos) << fault;
  }
}

TEST_F(TextSource, LinesUpToTheLimitAreRead) {
  const std::string path = write("file", "ab\nabcdef\nabcdefg\n");
  LineReader reader(path, 6);
  std::string line;
  EXPECT_TRUE(reader.next(line));
  EXPECT_TRUE(reader.next(line));
  EXPECT_EQ(line, "abcdef");
  EXPECT_EQ(
      error_of([&] { reader.next(line); }),
      fmt::format("[text_source] {}:3: the line is longer than 6 bytes: split the document", path));
}

TEST_F(TextSource, DirectoriesGiveTheirLinesSortedWithoutHiddenNames) {
  for (const char* name : {"d/b.jsonl",
                           "d/a.jsonl.gz",
                           "d/sub/c.ndjson",
                           "d/z.jsonl.zst",
                           "d/y.jsonlines",
                           "d/x.json-lines.zstd",
                           "d/.hidden.jsonl",
                           "d/.git/e.jsonl",
                           "d/notes.txt",
                           "d/f.json",
                           "d/g.jsonl.bak",
                           "d/a/q.jsonl"}) {
    write(name, "x");
  }
  const Lines wanted = {"d/a.jsonl.gz",
                        "d/a/q.jsonl",
                        "d/b.jsonl",
                        "d/sub/c.ndjson",
                        "d/x.json-lines.zstd",
                        "d/y.jsonlines",
                        "d/z.jsonl.zst"};
  EXPECT_EQ(found({directory_.path("d")}), wanted);
  EXPECT_EQ(found({directory_.path("d/")}), wanted);
}

TEST_F(TextSource, PatternsAndFilesComeInTheOrderOfTheWords) {
  for (const char* name :
       {"2.jsonl", "10.jsonl", "1.jsonl", "sub/3.jsonl", "any.name", "[x].jsonl", ".h.jsonl"}) {
    write(name, "x");
  }
  EXPECT_EQ(found({directory_.path("any.name"), directory_.path("[0-9]*.jsonl")}),
            (Lines{"any.name", "1.jsonl", "10.jsonl", "2.jsonl"}));
  EXPECT_EQ(found({directory_.path("s*")}), Lines{"sub/3.jsonl"});
  EXPECT_EQ(found({directory_.path("[x].jsonl")}),
            Lines{"[x].jsonl"});  // a name as it is comes first
  EXPECT_EQ(found({directory_.path("*.jsonl")}),
            (Lines{"1.jsonl", "10.jsonl", "2.jsonl", "[x].jsonl"}));
  const auto files = find_text_files(Lines{directory_.path("2.jsonl"), directory_.path("sub")});
  EXPECT_EQ(files[0].argument, 0U);
  EXPECT_EQ(files[1].argument, 1U);
}

TEST_F(TextSource, WordsThatNameNothingOrTheSameAreRefused) {
  write("d/notes.txt", "x");
  write("a.jsonl", "x");
  fs::create_symlink(directory_.path("gone.jsonl"), directory_.path("d/link.jsonl"));
  const auto fault = [&](const Lines& names) {
    Lines words;
    for (const std::string& name : names) {
      words.push_back(directory_.path(name));
    }
    return error_of([&] { find_text_files(words); });
  };
  EXPECT_NE(fault({"none.jsonl"}).find("no file or directory"), std::string::npos);
  EXPECT_NE(fault({"*.zst"}).find("nothing matches"), std::string::npos);
  EXPECT_NE(fault({"a.jsonl", "*.jsonl"}).find("is named twice"), std::string::npos);
  EXPECT_NE(fault({"a.jsonl", "d/../a.jsonl"}).find("is named twice"), std::string::npos);
  EXPECT_NE(fault({"d"}).find("link to nothing"), std::string::npos) << fault({"d"});
  fs::remove(directory_.path("d/link.jsonl"));
  EXPECT_NE(fault({"d"}).find("holds no *.jsonl"), std::string::npos) << fault({"d"});
  EXPECT_NE(error_of([&] { LineReader reader(directory_.path("none")); }).find("cannot open"),
            std::string::npos);
  EXPECT_NE(error_of([&] { LineReader reader(directory_.path("d")); }).find("cannot read"),
            std::string::npos);
}

}  // namespace
}  // namespace bifocal
