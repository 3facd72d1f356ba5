// Finding, decompressing and cutting of text files.
#include "data/text_source.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <glob.h>
#include <map>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <zlib.h>
#include <zstd.h>

#include "core/error.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBufferBytes = std::size_t{1} << 18;

// --- Finding ------------------------------------------------------------------------------------

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

bool has_lines(const fs::path& path) {
  std::string name = path.filename().string();
  for (const std::string_view packed : {".gz", ".zst", ".zstd"}) {
    if (name.ends_with(packed)) {
      name.resize(name.size() - packed.size());
      break;
    }
  }
  return std::ranges::any_of(std::array{".jsonl", ".ndjson", ".jsonlines", ".json-lines"},
                             [&](const char* ending) { return name.ends_with(ending); });
}

std::vector<std::string> files_below(const std::string& directory) {
  std::vector<std::string> paths;
  try {
    fs::recursive_directory_iterator entry(directory);
    for (; entry != fs::recursive_directory_iterator(); ++entry) {
      if (is_hidden(entry->path())) {
        entry.disable_recursion_pending();
      } else if (has_lines(entry->path()) && !entry->is_directory()) {
        paths.push_back(entry->path().string());
      }
    }
  } catch (const fs::filesystem_error& error) {
    fail("[text_source] cannot list {}: {}", directory, error.code().message());
  }
  BIFOCAL_REQUIRE(
      !paths.empty(),
      "[text_source] {} holds no *.jsonl, *.ndjson, *.jsonlines or *.json-lines (plain, "
      ".gz, .zst or .zstd): check the path, or name the files",
      directory);
  return paths;
}

std::vector<std::string> matches_of(const std::string& pattern) {
  glob_t found{};
  const int code = ::glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  BIFOCAL_REQUIRE(code == 0 || code == GLOB_NOMATCH,
                  "[text_source] cannot list what {} matches: check the directory's rights",
                  pattern);
  BIFOCAL_REQUIRE(!paths.empty(), "[text_source] nothing matches {}: check the pattern", pattern);
  return paths;
}

std::vector<std::string> paths_of(const std::string& word) {
  std::error_code ignored;
  std::vector<std::string> matches;
  if (fs::exists(word, ignored)) {
    matches = {word};
  } else {
    BIFOCAL_REQUIRE(word.find_first_of("*?[") != std::string::npos,
                    "[text_source] no file or directory {}: check the path",
                    word);
    matches = matches_of(word);
  }
  std::vector<std::string> paths;
  for (const std::string& match : matches) {
    if (fs::is_directory(match, ignored)) {
      const std::vector<std::string> below = files_below(match);
      paths.insert(paths.end(), below.begin(), below.end());
    } else {
      paths.push_back(match);
    }
  }
  std::ranges::sort(paths);
  return paths;
}

// --- Reading ------------------------------------------------------------------------------------

// The bytes of a file as they lie on the disk.
class RawFile {
 public:
  explicit RawFile(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), buffer_(kBufferBytes) {
    BIFOCAL_REQUIRE(fd_ >= 0, "[text_source] cannot open {}: {}", path, std::strerror(errno));
  }

  ~RawFile() { ::close(fd_); }

  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;
  RawFile(RawFile&&) = delete;
  RawFile& operator=(RawFile&&) = delete;

  // At least `wanted` bytes that were not taken yet, fewer at the file's end. wanted must be small.
  std::string_view peek(std::size_t wanted) {
    while (end_ - begin_ < wanted && !is_at_end_) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
      const ssize_t got = ::read(fd_, buffer_.data() + end_, buffer_.size() - end_);
      if (got < 0 && errno == EINTR) {
        continue;
      }
      BIFOCAL_REQUIRE(got >= 0, "[text_source] cannot read {}: {}", path_, std::strerror(errno));
      is_at_end_ = got == 0;
      end_ += static_cast<std::size_t>(got);
    }
    return {buffer_.data() + begin_, end_ - begin_};
  }

  void take(std::size_t bytes) {
    begin_ += bytes;
    taken_ += static_cast<std::int64_t>(bytes);
  }

  std::int64_t taken() const { return taken_; }

 private:
  std::string path_;
  int fd_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  bool is_at_end_ = false;
  std::int64_t taken_ = 0;
};

// The text behind a file's bytes. read gives the number of bytes written to out, 0 at the end.
class Decoder {
 public:
  explicit Decoder(RawFile& file) : file_(&file) {}

  virtual ~Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  Decoder(Decoder&&) = delete;
  Decoder& operator=(Decoder&&) = delete;

  virtual std::size_t read(std::span<char> out) = 0;

 protected:
  RawFile& file() const { return *file_; }

 private:
  RawFile* file_;
};

class PlainDecoder final : public Decoder {
 public:
  using Decoder::Decoder;

  std::size_t read(std::span<char> out) override {
    const std::string_view bytes = file().peek(1).substr(0, out.size());
    std::ranges::copy(bytes, out.begin());
    file().take(bytes.size());
    return bytes.size();
  }
};

constexpr std::string_view kGzip = "\x1f\x8b";

class GzipDecoder final : public Decoder {
 public:
  explicit GzipDecoder(RawFile& raw) : Decoder(raw) {
    constexpr int kGzipOnly = MAX_WBITS + 16;
    BIFOCAL_REQUIRE(inflateInit2(&stream_, kGzipOnly) == Z_OK, "[text_source] zlib: no memory");
  }

  ~GzipDecoder() override { inflateEnd(&stream_); }

  GzipDecoder(const GzipDecoder&) = delete;
  GzipDecoder& operator=(const GzipDecoder&) = delete;
  GzipDecoder(GzipDecoder&&) = delete;
  GzipDecoder& operator=(GzipDecoder&&) = delete;

  std::size_t read(std::span<char> out) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out.data());
    stream_.avail_out = static_cast<uInt>(out.size());
    while (stream_.avail_out == out.size()) {
      if (is_between_members_ && !start_member()) {
        return 0;
      }
      const std::string_view bytes = file().peek(1);
      // zlib does not write to its input.
      stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
      stream_.avail_in = static_cast<uInt>(bytes.size());
      const int code = inflate(&stream_, Z_NO_FLUSH);
      file().take(bytes.size() - stream_.avail_in);
      if (code == Z_STREAM_END) {
        is_between_members_ = true;
        continue;
      }
      BIFOCAL_REQUIRE(code != Z_BUF_ERROR || !bytes.empty(),
                      "the gzip data end in the middle: the file is cut off");
      BIFOCAL_REQUIRE(code == Z_OK || code == Z_BUF_ERROR,
                      "the gzip data are corrupt ({})",
                      stream_.msg != nullptr ? stream_.msg : zError(code));
    }
    return out.size() - stream_.avail_out;
  }

 private:
  // False at the end of the file. Zero bytes may follow the last member, as tape blocks once did.
  bool start_member() {
    std::string_view bytes = file().peek(kGzip.size());
    if (bytes.starts_with(kGzip)) {
      is_between_members_ = false;
      BIFOCAL_ASSERT(inflateReset(&stream_) == Z_OK);
      return true;
    }
    while (!bytes.empty()) {
      BIFOCAL_REQUIRE(std::ranges::all_of(bytes, [](char byte) { return byte == '\0'; }),
                      "bytes that are no gzip data follow the gzip data");
      file().take(bytes.size());
      bytes = file().peek(1);
    }
    return false;
  }

  z_stream stream_{};
  bool is_between_members_ = true;
};

class ZstdDecoder final : public Decoder {
 public:
  explicit ZstdDecoder(RawFile& raw) : Decoder(raw), stream_(ZSTD_createDStream()) {
    BIFOCAL_REQUIRE(stream_ != nullptr, "[text_source] zstd: no memory");
    // Archives made with --long=27 to 29 are read; a window is allocated as the file asks for it,
    // so more would let a few bytes take gigabytes.
    constexpr int kWindowLog = 29;
    check(ZSTD_DCtx_setParameter(stream_, ZSTD_d_windowLogMax, kWindowLog));
  }

  ~ZstdDecoder() override { ZSTD_freeDStream(stream_); }

  ZstdDecoder(const ZstdDecoder&) = delete;
  ZstdDecoder& operator=(const ZstdDecoder&) = delete;
  ZstdDecoder(ZstdDecoder&&) = delete;
  ZstdDecoder& operator=(ZstdDecoder&&) = delete;

  std::size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos == 0) {
      const std::string_view bytes = file().peek(1);
      if (bytes.empty() && hint_ == 0) {
        return 0;
      }
      ZSTD_inBuffer input{bytes.data(), bytes.size(), 0};
      hint_ = check(ZSTD_decompressStream(stream_, &output, &input));
      file().take(input.pos);
      // With no input left the library may still hold text that the last call had no room for.
      BIFOCAL_REQUIRE(!bytes.empty() || output.pos > 0 || hint_ == 0,
                      "the zstd data end in the middle: the file is cut off");
    }
    return output.pos;
  }

 private:
  static std::size_t check(std::size_t code) {
    BIFOCAL_REQUIRE(
        ZSTD_isError(code) == 0, "the zstd data are corrupt ({})", ZSTD_getErrorName(code));
    return code;
  }

  ZSTD_DStream* stream_;
  std::size_t hint_ = 0;  // 0: between frames
};

std::unique_ptr<Decoder> make_decoder(RawFile& file, const std::string& path) {
  constexpr std::string_view kZstd = "\x28\xb5\x2f\xfd";
  constexpr std::string_view kZstdSkippable = "\x2a\x4d\x18";  // after a byte 0x50 to 0x5f
  const std::string_view start = file.peek(6).substr(0, 6);
  if (start.starts_with(kGzip)) {
    return std::make_unique<GzipDecoder>(file);
  }
  const bool is_skippable = !start.empty() &&
                            (static_cast<unsigned char>(start[0]) & 0xF0U) == 0x50U &&
                            start.substr(1).starts_with(kZstdSkippable);
  if (start.starts_with(kZstd) || is_skippable) {
    return std::make_unique<ZstdDecoder>(file);
  }
  for (const auto& [magic, name] : {std::pair<std::string_view, const char*>{"\xfd"
                                                                             "7zXZ",
                                                                             "xz"},
                                    {"BZh", "bzip2"},
                                    {"PK\x03\x04", "zip"},
                                    {"PAR1", "Parquet"},
                                    {"\xff\xfe", "UTF-16"},
                                    {"\xfe\xff", "UTF-16"}}) {
    BIFOCAL_REQUIRE(!start.starts_with(magic),
                    "[text_source] {} is {}: only UTF-8 lines are read, plain, gzip or zstd: "
                    "convert it",
                    path,
                    name);
  }
  return std::make_unique<PlainDecoder>(file);
}

}  // namespace

std::vector<TextFile> find_text_files(std::span<const std::string> words) {
  std::vector<TextFile> files;
  std::map<fs::path, std::size_t> named_by;
  for (std::size_t argument = 0; argument < words.size(); ++argument) {
    for (const std::string& path : paths_of(words[argument])) {
      std::error_code code;
      BIFOCAL_REQUIRE(
          fs::exists(path, code), "[text_source] cannot open {}: is it a link to nothing?", path);
      const fs::path whole = fs::canonical(path, code);  // fails for pipes
      const auto [place, is_new] = named_by.emplace(code ? fs::path(path) : whole, argument);
      BIFOCAL_REQUIRE(is_new,
                      "[text_source] {} is named twice, by {} and by {}: name it once",
                      path,
                      words[place->second],
                      words[argument]);
      const bool is_regular = fs::is_regular_file(path, code);
      files.push_back(
          {.path = path,
           .argument = argument,
           .bytes = is_regular ? static_cast<std::int64_t>(fs::file_size(path, code)) : 0});
    }
  }
  return files;
}

struct LineReader::Impl {
  Impl(const std::string& name, std::size_t limit)
      : path(name), max_line_bytes(limit), file(name), decoder(make_decoder(file, name)) {}

  // Refills the buffer; false at the end of the text.
  bool refill() {
    begin = 0;
    try {
      end = decoder->read(buffer);
    } catch (const Error& error) {
      fail("[text_source] {}:{}: {}", path, number + 1, error.what());
    }
    return end > 0;
  }

  bool next(std::string& line);

  std::string path;
  std::size_t max_line_bytes;
  RawFile file;
  std::unique_ptr<Decoder> decoder;
  std::vector<char> buffer = std::vector<char>(kBufferBytes);
  std::size_t begin = 0;
  std::size_t end = 0;
  std::int64_t number = 0;
};

bool LineReader::Impl::next(std::string& line) {
  line.clear();
  bool has_break = false;
  bool has_text = false;
  while (!has_break && (begin < end || refill())) {
    const std::string_view left(buffer.data() + begin, end - begin);
    const std::size_t length = std::min(left.find('\n'), left.size());
    has_break = length < left.size();
    has_text = true;
    BIFOCAL_REQUIRE(line.size() + length <= max_line_bytes,
                    "[text_source] {}:{}: the line is longer than {} bytes: split the document",
                    path,
                    number + 1,
                    max_line_bytes);
    line.append(left.substr(0, length));
    begin += length + (has_break ? 1 : 0);
  }
  if (!has_text) {
    return false;
  }
  number += 1;
  if (has_break && line.ends_with('\r')) {
    line.pop_back();
  }
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (number == 1 && line.starts_with(kByteOrderMark)) {
    line.erase(0, kByteOrderMark.size());
  }
  return true;
}

LineReader::LineReader(const std::string& path, std::size_t max_line_bytes)
    : impl_(std::make_unique<Impl>(path, max_line_bytes)) {}

LineReader::~LineReader() = default;
LineReader::LineReader(LineReader&&) noexcept = default;
LineReader& LineReader::operator=(LineReader&&) noexcept = default;

bool LineReader::next(std::string& line) {
  return impl_->next(line);
}

std::int64_t LineReader::number() const {
  return impl_->number;
}

std::int64_t LineReader::bytes_read() const {
  return impl_->file.taken();
}

}  // namespace bifocal
