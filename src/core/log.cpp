// Console, JSON lines and the formats of progress lines.
#include "core/log.h"

#include <cerrno>
#include <cmath>
#include <fcntl.h>
#include <filesystem>
#include <sys/ioctl.h>
#include <system_error>
#include <unistd.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace bifocal {

namespace {

// 0 where the descriptor is no terminal or one without a size.
std::size_t columns_of(int descriptor) {
  winsize size{};
  const bool is_terminal = isatty(descriptor) == 1;
  return is_terminal && ioctl(descriptor, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// An MPI launcher gives each rank a pseudo-terminal without a size and copies it to its own output,
// which may be a file: there, the parent's output decides.
std::size_t columns_of_launcher() {
  std::error_code error;
  const auto path =
      std::filesystem::read_symlink(fmt::format("/proc/{}/fd/1", getppid()), error).string();
  const bool is_device = path.starts_with("/dev/pts/") || path.starts_with("/dev/tty");
  const int descriptor = is_device ? open(path.c_str(), O_RDONLY | O_NOCTTY | O_CLOEXEC) : -1;
  if (descriptor < 0) {
    return 0;
  }
  const std::size_t columns = columns_of(descriptor);
  close(descriptor);
  return columns;
}

std::size_t terminal_columns(std::FILE* out) {
  const int descriptor = fileno(out);
  if (isatty(descriptor) != 1) {
    return 0;
  }
  const std::size_t columns = columns_of(descriptor);
  return columns > 0 ? columns : columns_of_launcher();
}

}  // namespace

Console::Console(bool is_speaking, std::FILE* out)
    : out_(out), is_speaking_(is_speaking), columns_(terminal_columns(out)) {}

Console::~Console() {
  end_live();
}

void Console::print(std::string_view line) {
  if (!is_speaking_) {
    return;
  }
  clear_live();
  std::fwrite(line.data(), 1, line.size(), out_);
  std::fputc('\n', out_);
  std::fflush(out_);
}

void Console::live(std::string_view line) {
  if (!is_speaking_ || !is_terminal()) {
    return;
  }
  clear_live();
  // One column short: a full last column makes some terminals wrap, and '\r' would not return.
  const std::string_view shown = line.substr(0, columns_ - 1);
  std::fwrite(shown.data(), 1, shown.size(), out_);
  std::fflush(out_);
  has_live_ = true;
}

void Console::plain(std::string_view line) {
  if (!is_terminal()) {
    print(line);
  }
}

void Console::end_live() {
  if (has_live_) {
    std::fputc('\n', out_);
    std::fflush(out_);
    has_live_ = false;
  }
}

void Console::clear_live() {
  if (has_live_) {
    std::fputs("\r\x1b[K", out_);  // ANSI: erase to the end of the line
    has_live_ = false;
  }
}

JsonLines::JsonLines(const std::string& path) : path_(path), stream_(path, std::ios::app) {
  BIFOCAL_REQUIRE(stream_.is_open(),
                  "[log] wanted to append to {}, got: {}: check the directory and its rights",
                  path,
                  std::generic_category().message(errno));
}

void JsonLines::write(const nlohmann::ordered_json& object) {
  stream_ << object.dump() << '\n' << std::flush;
  BIFOCAL_REQUIRE(stream_.good(),
                  "[log] writing {} failed: {}: check the space left",
                  path_,
                  std::generic_category().message(errno));
}

double Stopwatch::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

void Stopwatch::restart() {
  start_ = std::chrono::steady_clock::now();
}

std::string format_count(std::int64_t count) {
  std::string text = fmt::format("{}", count);
  const std::int64_t first_digit = count < 0 ? 1 : 0;
  for (auto at = static_cast<std::int64_t>(text.size()) - 3; at > first_digit; at -= 3) {
    text.insert(static_cast<std::size_t>(at), 1, ',');
  }
  return text;
}

std::string format_tokens_per_second(double rate) {
  return std::isfinite(rate) ? format_count(std::llround(rate)) + " tokens/s" : "- tokens/s";
}

std::string format_duration(double seconds) {
  constexpr std::int64_t kMinute = 60;
  constexpr std::int64_t kHour = 60 * kMinute;
  constexpr std::int64_t kDay = 24 * kHour;
  if (!std::isfinite(seconds) || seconds < 0) {
    return "-";
  }
  const std::int64_t whole = std::llround(seconds);
  if (whole < kMinute) {
    return fmt::format("{}s", whole);
  }
  if (whole < kHour) {
    return fmt::format("{}m{:02}s", whole / kMinute, whole % kMinute);
  }
  if (whole < kDay) {
    return fmt::format("{}h{:02}m", whole / kHour, whole % kHour / kMinute);
  }
  return fmt::format("{}d{:02}h", whole / kDay, whole % kDay / kHour);
}

}  // namespace bifocal
