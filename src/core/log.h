// What a run tells people (console of rank 0) and machines (JSON lines), and its clock.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace bifocal {

// On a terminal: lines, and below them one live line that is rewritten in place. Elsewhere: plain
// lines only. Not thread safe.
class Console {
 public:
  // is_speaking: whether this rank prints at all. `out` must outlive the console.
  explicit Console(bool is_speaking, std::FILE* out = stdout);
  // Ends the live line.
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  // A line that stays, terminal or not.
  void print(std::string_view line);

  // Replaces the live line, cut to the terminal's width; nothing where there is no terminal.
  void live(std::string_view line);

  // A line for logs: printed where there is no terminal, nothing on one.
  void plain(std::string_view line);

  // Leaves the live line where it is, as a line that stays.
  void end_live();

  bool is_terminal() const { return columns_ > 0; }

 private:
  void clear_live();

  std::FILE* out_;
  bool is_speaking_;
  std::size_t columns_;  // of the terminal; 0: not one
  bool has_live_ = false;
};

// Appends one JSON object a line and flushes each. Throws Error when the file cannot be written.
class JsonLines {
 public:
  explicit JsonLines(const std::string& path);

  // NaN and infinities are written as null.
  void write(const nlohmann::ordered_json& object);

 private:
  std::string path_;
  std::ofstream stream_;
};

// Seconds since construction or the last restart.
class Stopwatch {
 public:
  double seconds() const;
  void restart();

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// "1,234,567"
std::string format_count(std::int64_t count);

// "5,012 tokens/s"; a rate that is not finite reads "- tokens/s".
std::string format_tokens_per_second(double rate);

// "7s", "2m05s", "3h07m", "2d04h"; "-" for what is not finite or negative.
std::string format_duration(double seconds);

}  // namespace bifocal
