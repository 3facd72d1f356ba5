// Regular expressions over bytes (PCRE2), with a bound on the work of one search.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace bifocal {

// Groups of one match, the whole match first. A group that took no part has data() == nullptr.
using RegexMatch = std::vector<std::string_view>;

class Regex {
 public:
  // Perl's syntax over bytes: `.` is any byte but a line feed, `$` also stands before a line feed
  // that ends the text, classes know ASCII alone. Throws Error with the place of a mistake.
  explicit Regex(std::string_view pattern);
  ~Regex();
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Calls visit with every match from left to right, as Perl's /g finds them, until it returns
  // false. Views point into text. Throws Error where a search needs more steps than a pattern of
  // linear cost ever does: patterns that try every way to part a text end so and not never.
  void for_each(std::string_view text,
                const std::function<bool(const RegexMatch& match)>& visit) const;

  bool matches(std::string_view text) const;

  // The text with every match replaced by its group `group`; -1: removed.
  std::string replace(std::string_view text, int group) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bifocal
