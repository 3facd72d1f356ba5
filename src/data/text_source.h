// Text files as lines: which files the words of a command line mean, and reading them, compressed
// or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bifocal {

struct TextFile {
  std::string path;
  std::size_t argument = 0;  // index of the word that named it
  std::int64_t bytes = 0;    // on the disk; 0 for what is no regular file
};

// The files that the words name, in the order of the words, sorted by path within each:
// - a file;
// - a directory: all *.jsonl, *.ndjson, *.jsonlines and *.json-lines below it, plain or with .gz,
//   .zst or .zstd; hidden names and links to directories are left out;
// - a pattern with *, ? or [..]: the files and directories that match.
// Throws Error for a word that names nothing, and for a file that is named twice.
std::vector<TextFile> find_text_files(std::span<const std::string> words);

// The lines of a file: plain, gzip (any number of members) or zstd (any number of frames), told
// apart by the first bytes. Memory is bounded by the longest line, whatever the file's size.
class LineReader {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{1} << 28;

  // Throws Error where the file cannot be opened or is compressed in another way.
  explicit LineReader(const std::string& path, std::size_t max_line_bytes = kMaxLineBytes);
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  LineReader(LineReader&&) noexcept;
  LineReader& operator=(LineReader&&) noexcept;

  // Puts the next line into `line`, without "\n" or "\r\n" and without a byte order mark at the
  // file's start; false at the end. Throws Error that names file and line for compressed data that
  // are corrupt or end too early, for a line above the limit, and where reading fails.
  bool next(std::string& line);

  // Of the line that next gave, from 1.
  std::int64_t number() const;

  // Bytes of the file taken so far, as they lie on the disk.
  std::int64_t bytes_read() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bifocal
