// The regular expressions by which tokenizers cut text, and the cutting.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace bifocal {

// The pattern of a tokenizer.json, which is meant for Oniguruma's Ruby syntax, for PCRE2 with UTF
// and UCP. Throws Error naming a construct that is not known to mean the same in both.
std::string to_pcre2(std::string_view pattern);

// A compiled pattern; any number of threads may use it.
class SplitPattern {
 public:
  // Throws Error with the place of a mistake.
  explicit SplitPattern(std::string_view pattern);

  const std::string& text() const { return text_; }

  const void* code() const { return code_.get(); }

 private:
  std::string text_;  // as the file has it
  std::shared_ptr<const void> code_;
};

// Far more than any pattern in use needs for a text of that size.
std::chrono::duration<double> time_to_split(std::size_t text_bytes);

// What cutting one text may cost: patterns are data, and some would take hours.
class SplitBudget {
 public:
  explicit SplitBudget(std::chrono::duration<double> time);

  // Throws Error naming the pattern once the time is over. Looks at the clock now and then only,
  // or at once.
  void check(const SplitPattern& pattern, bool at_once);

 private:
  std::chrono::steady_clock::time_point end_;
  unsigned calls_ = 0;
};

// Cuts a text into the matches of a pattern and what stands between them.
class Splitter {
 public:
  // All must outlive the splitter. The text is UTF-8.
  Splitter(const SplitPattern& pattern, std::string_view text, SplitBudget& budget);

  // The next piece, never empty; nothing at the end. Throws Error where matching takes too much.
  std::optional<std::string_view> next();

 private:
  bool find_match();
  bool search(std::size_t from);

  const SplitPattern& pattern_;
  std::string_view text_;
  SplitBudget& budget_;
  std::size_t piece_begin_ = 0;  // all before it has been handed out
  std::size_t search_from_ = 0;
  std::optional<std::size_t> last_match_end_;
  std::size_t match_begin_ = 0;
  std::size_t match_end_ = 0;
  bool has_match_ = false;  // one that has not been handed out
};

}  // namespace bifocal
