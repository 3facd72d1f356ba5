// Which constructs of Oniguruma's Ruby syntax mean the same in PCRE2, and how they are written
// there.
#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "data/split_pattern.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

// White_Space; PCRE2's own \s has U+180E too.
constexpr std::string_view kSpaces =
    R"(\x09-\x0D\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

constexpr std::array kCategories = {
    "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N",  "Nd", "Nl", "No", "P", "Pc",
    "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp"};

constexpr std::array<std::string_view, 7> kGroups = {
    "(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  std::string run() {
    while (at_ < pattern_.size()) {
      const char c = pattern_[at_];
      if (c == '\\') {
        escape(false);
      } else if (c == '[') {
        character_class();
      } else if (c == '(') {
        group();
      } else if (c == '{') {
        interval();
      } else {
        if (c == ')' && is_caseless_.size() > 1) {
          is_caseless_.pop_back();
        }
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  std::string_view rest() const { return pattern_.substr(at_); }

  [[noreturn]] void refuse(std::string_view construct) const {
    fail(
        "[tokenizer] the pattern \"{}\" uses {} at byte {}, which is not supported: its meaning "
        "depends on the regex library",
        pattern_,
        construct,
        at_);
  }

  void group() {
    if (rest().starts_with("(*")) {
      refuse("(*");
    }
    if (!rest().starts_with("(?")) {  // nobody asks what a group captured
      out_ += "(?:";
      ++at_;
      is_caseless_.push_back(is_caseless_.back());
      return;
    }
    const auto* known =
        std::ranges::find_if(kGroups, [&](auto start) { return rest().starts_with(start); });
    if (known == kGroups.end()) {
      refuse(rest().substr(0, 4));
    }
    out_ += *known;
    at_ += known->size();
    is_caseless_.push_back(is_caseless_.back() || *known == "(?i:");
  }

  // {n}, {n,} and {n,m}; any other { stands for itself.
  void interval() {
    std::size_t end = at_ + 1;
    while (end < pattern_.size() && is_digit(pattern_[end])) {
      ++end;
    }
    const std::size_t digits = end - at_ - 1;
    const bool has_comma = end < pattern_.size() && pattern_[end] == ',';
    end += has_comma ? 1 : 0;
    const std::size_t upper = end;
    while (has_comma && end < pattern_.size() && is_digit(pattern_[end])) {
      ++end;
    }
    if (end == pattern_.size() || pattern_[end] != '}' || (digits == 0 && end == upper)) {
      out_ += "\\{";
      ++at_;
      return;
    }
    const char after = end + 1 < pattern_.size() ? pattern_[end + 1] : ' ';
    if (digits == 0 || after == '+' || (after == '?' && !has_comma)) {
      refuse(pattern_.substr(at_, end + 2 - at_));
    }
    out_ += pattern_.substr(at_, end + 1 - at_);
    at_ = end + 1;
  }

  void character_class() {
    out_ += '[';
    ++at_;
    if (rest().starts_with("^")) {
      out_ += '^';
      ++at_;
    }
    if (rest().starts_with("]")) {
      refuse("[]");
    }
    while (!rest().starts_with("]")) {
      if (at_ == pattern_.size()) {
        refuse("[ without ]");
      } else if (pattern_[at_] == '[') {
        refuse("[ in a class");
      } else if (rest().starts_with("&&")) {
        refuse("&& in a class");
      } else if (pattern_[at_] == '\\') {
        escape(true);
      } else {
        out_ += pattern_[at_++];
      }
    }
    out_ += ']';
    ++at_;
  }

  void escape(bool in_class) {
    BIFOCAL_REQUIRE(
        at_ + 1 < pattern_.size(), "[tokenizer] the pattern \"{}\" ends with \\", pattern_);
    const char c = pattern_[at_ + 1];
    if (c == 's') {
      out_ += in_class ? std::string(kSpaces) : fmt::format("[{}]", kSpaces);
      at_ += 2;
    } else if (c == 'S') {
      out_ += in_class ? std::string("\\P{White_Space}") : fmt::format("[^{}]", kSpaces);
      at_ += 2;
    } else if (c == 'p' || c == 'P') {
      property();
    } else if (c == 'x' || c == 'u') {
      code_point();
    } else if (c == 'v') {  // a whole class of its own in PCRE2
      out_ += "\\x0B";
      at_ += 2;
    } else if (std::string_view("rntfaedD").find(c) != std::string_view::npos) {
      out_ += {'\\', c};
      at_ += 2;
    } else if (is_letter(c) || is_digit(c)) {
      refuse(pattern_.substr(at_, 2));
    } else {
      const Utf8Part part = utf8_part(pattern_, at_ + 1);
      out_ += pattern_.substr(at_, 1 + part.bytes);
      at_ += 1 + part.bytes;
    }
  }

  void property() {
    const std::size_t close = pattern_.find('}', at_);
    if (pattern_.substr(at_ + 2, 1) != "{" || close == std::string_view::npos) {
      refuse(pattern_.substr(at_, 2));
    }
    std::string_view name = pattern_.substr(at_ + 3, close - at_ - 3);
    bool is_negative = pattern_[at_ + 1] == 'P';
    if (name.starts_with("^")) {
      name.remove_prefix(1);
      is_negative = !is_negative;
    }
    const bool has_case = name == "Lu" || name == "Ll" || name == "Lt";
    if (std::ranges::find(kCategories, name) == kCategories.end() ||
        (has_case && is_caseless_.back())) {
      refuse(pattern_.substr(at_, close + 1 - at_));
    }
    out_ += fmt::format("\\{}{{{}}}", is_negative ? 'P' : 'p', name);
    at_ = close + 1;
  }

  // \xHH below 80, \x{H..} and \uHHHH.
  void code_point() {
    const auto is_hex = [](char c) {
      return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
    };
    const bool is_braced = pattern_.substr(at_ + 1, 2) == "x{";
    const std::size_t begin = at_ + (is_braced ? 3 : 2);
    const std::size_t most = is_braced ? 6 : (pattern_[at_ + 1] == 'u' ? 4 : 2);
    std::size_t end = begin;
    while (end < pattern_.size() && end - begin < most && is_hex(pattern_[end])) {
      ++end;
    }
    const std::string digits(pattern_.substr(begin, end - begin));
    const bool is_closed = is_braced ? pattern_.substr(end, 1) == "}" : digits.size() == most;
    if (digits.empty() || !is_closed || (most == 2 && digits[0] > '7')) {
      refuse(pattern_.substr(at_, end + 1 - at_));
    }
    out_ += fmt::format("\\x{{{}}}", digits);
    at_ = end + (is_braced ? 1 : 0);
  }

  std::string_view pattern_;
  std::size_t at_ = 0;
  std::string out_;
  std::vector<bool> is_caseless_{false};  // of the groups around
};

}  // namespace

std::string to_pcre2(std::string_view pattern) {
  return Translator(pattern).run();
}

}  // namespace bifocal
