// Extraction and normalisation of answers.
#include "evaluate/answer_extraction.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "evaluate/regex.h"

namespace bifocal {

namespace {

constexpr std::string_view kSpaces = " \t\r\n\f\v";
// A sign (hyphen or U+2212) that is no subtraction, then digits and commas, then a fraction.
constexpr const char* kNumber =
    R"((?:(?<![\w)\]}])(?:-|\xe2\x88\x92))?(?:\d[\d,]*(?:\.\d+)?|(?<![\d.])\.\d+))";

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_space(char c) {
  return kSpaces.find(c) != std::string_view::npos;
}

bool is_word(char c) {
  return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

std::string_view trim(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) {
    return {};
  }
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

std::vector<std::string_view> all_groups(const Regex& regex, std::string_view text) {
  std::vector<std::string_view> found;
  regex.for_each(text, [&](const RegexMatch& match) {
    found.push_back(match[1]);
    return true;
  });
  return found;
}

std::string replace_all(const std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  std::size_t copied = 0;
  for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, copied)) {
    out.append(text, copied, at - copied).append(to);
    copied = at + from.size();
  }
  return copied == 0 ? text : out.append(text, copied);
}

// Whether commas stand between groups of three digits: "1,234,567".
bool has_thousands(std::string_view digits) {
  const std::size_t first = digits.find(',');
  if (first == 0 || first > 3 || first == std::string_view::npos) {
    return false;
  }
  for (std::size_t at = first; at < digits.size(); at += 4) {
    if (digits[at] != ',' || digits.size() - at < 4 ||
        !std::ranges::all_of(digits.substr(at + 1, 3), is_digit)) {
      return false;
    }
  }
  return true;
}

// The numbers in one run of digits and commas: itself, or its pieces where the commas list things.
void append_run(std::string_view run, std::vector<std::string_view>& found) {
  run = run.substr(0, run.find_last_not_of(',') + 1);
  const std::size_t integer = std::min(run.find('.'), run.size());
  const std::size_t sign = run.find_first_of("0123456789.");
  const std::string_view digits = run.substr(sign, integer - sign);
  if (digits.find(',') == std::string_view::npos || has_thousands(digits)) {
    found.push_back(run);
    return;
  }
  for (std::size_t begin = 0; begin < run.size();) {
    const std::size_t end = std::min(run.find(',', begin), run.size());
    if (end > begin) {
      found.push_back(run.substr(begin, end - begin));
    }
    begin = end + 1;
  }
}

// Commands whose argument is the text they show.
std::string unwrap_fonts(std::string text) {
  static const Regex font(R"(\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\})");
  constexpr int kNesting = 4;  // of fonts in fonts; deeper nesting stays as it is
  for (int pass = 0; pass < kNesting && text.find('\\') != std::string::npos; ++pass) {
    text = font.replace(text, 1);
  }
  return text;
}

// normalize_answer but for white space and for what holds for an answer as a whole.
std::string normalize_symbols(std::string_view answer) {
  static const Regex noise(R"(\\(?:left|right|displaystyle)(?![A-Za-z])|\\[!,;:()\[\]$% ]|)"
                           R"(\^\\circ|\^\{\\circ\}|[~$%]|\*\*)");
  std::string text = replace_all(std::string(answer), "\xe2\x88\x92", "-");
  text = replace_all(unwrap_fonts(std::move(text)), "{,}", ",");
  text = noise.replace(text, -1);
  return replace_all(replace_all(text, "\\dfrac", "\\frac"), "\\tfrac", "\\frac");
}

// \frac{1}{2} and \frac12 as 1/2.
std::string write_fractions(const std::string& text) {
  static const Regex fraction(R"(\\frac\s?(?:\{(-?\d+)\}|(\d))\s?(?:\{(\d+)\}|(\d)))");
  std::string out;
  std::size_t copied = 0;
  fraction.for_each(text, [&](const RegexMatch& match) {
    const auto begin = static_cast<std::size_t>(match[0].data() - text.data());
    out.append(text, copied, begin - copied);
    out.append(match[1]).append(match[2]).append("/").append(match[3]).append(match[4]);
    copied = begin + match[0].size();
    return true;
  });
  return out.append(text, copied);
}

}  // namespace

Extraction extraction_of(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, Extraction>, 4> kNames{
      {{"auto", Extraction::automatic},
       {"boxed", Extraction::boxed},
       {"hash", Extraction::hash},
       {"number", Extraction::number}}};
  for (const auto& [known, value] : kNames) {
    if (known == name) {
      return value;
    }
  }
  fail("[grade] wanted auto, boxed, hash or number as extraction, got '{}'", name);
}

std::vector<std::string_view> boxed_answers(std::string_view text) {
  struct Open {
    std::size_t begin;  // of the content
    bool is_box;
    bool holds_box;
  };

  constexpr std::array<std::string_view, 2> kBoxes{"\\boxed", "\\fbox"};
  std::vector<std::string_view> found;
  std::vector<Open> open;
  std::size_t box_at = std::string_view::npos;  // where the brace of a \boxed just read must stand
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\') {
      const auto box = std::ranges::find_if(
          kBoxes, [&](std::string_view name) { return text.substr(i).starts_with(name); });
      if (box == kBoxes.end()) {
        ++i;  // the next character is escaped
        continue;
      }
      i += box->size() - 1;
      box_at = std::min(text.find_first_not_of(kSpaces, i + 1), text.size());
    } else if (c == '{') {
      open.push_back({i + 1, i == box_at, false});
    } else if (c == '}' && !open.empty()) {
      const Open closed = open.back();
      open.pop_back();
      if (closed.is_box && !closed.holds_box) {
        found.push_back(trim(text.substr(closed.begin, i - closed.begin)));
      }
      if (!open.empty()) {
        open.back().holds_box |= closed.is_box || closed.holds_box;
      }
    }
  }
  return found;
}

std::vector<std::string_view> hash_answers(std::string_view text) {
  // Bounded, so that hostile texts cost no more than a multiple of their length.
  static const Regex regex(
      R"((?m)(?<!#)####[ \t]{0,8}(?=[^\s\d]{0,200}\d)([^\s#]\S{0,200})[ \t\r]{0,8}$)");
  return all_groups(regex, text);
}

std::vector<std::string_view> numbers(std::string_view text) {
  static const Regex regex(kNumber);
  std::vector<std::string_view> found;
  regex.for_each(text, [&](const RegexMatch& match) {
    append_run(match[0], found);
    return true;
  });
  return found;
}

std::optional<std::string_view> extract_answer(std::string_view text, Extraction how) {
  const auto last = [](const std::vector<std::string_view>& found) {
    return found.empty() ? std::nullopt : std::optional(found.back());
  };
  std::optional<std::string_view> answer;
  if (how == Extraction::boxed || how == Extraction::automatic) {
    answer = last(boxed_answers(text));
  }
  if (how == Extraction::hash || (how == Extraction::automatic && !answer)) {
    answer = last(hash_answers(text));
  }
  if (how == Extraction::number || (how == Extraction::automatic && !answer)) {
    answer = last(numbers(text));
  }
  return answer;
}

std::vector<std::string_view> final_statements(std::string_view text) {
  static const Regex phrase(std::string(R"((?i)\banswer(?:\s{1,4}is|\s{0,4}:)[\s:*$]{0,8}()")
                                .append(kNumber)
                                .append(")"));
  std::vector<std::string_view> found = boxed_answers(text);
  if (found.empty()) {
    found = hash_answers(text);
  }
  if (found.empty()) {
    found = all_groups(phrase, text);
  }
  return found;
}

std::optional<std::string> canonical_number(std::string_view text) {
  std::string_view rest = text;
  const bool negative = rest.starts_with('-');
  if (negative || rest.starts_with('+')) {
    rest.remove_prefix(1);
  }
  const std::size_t point = std::min(rest.find('.'), rest.size());
  std::string integer(rest.substr(0, point));
  std::string fraction(point < rest.size() ? rest.substr(point + 1) : "");
  if (has_thousands(integer)) {
    std::erase(integer, ',');
  }
  if ((integer.empty() && fraction.empty()) || !std::ranges::all_of(integer, is_digit) ||
      !std::ranges::all_of(fraction, is_digit)) {
    return std::nullopt;
  }
  integer.erase(0, std::min(integer.find_first_not_of('0'), integer.size()));
  fraction.resize(fraction.find_last_not_of('0') + 1);  // npos + 1 is 0
  std::string number = integer.empty() ? "0" : integer;
  if (!fraction.empty()) {
    number += "." + fraction;
  }
  return negative && number != "0" ? "-" + number : number;
}

std::string normalize_answer(std::string_view text) {
  std::string answer = normalize_symbols(text);
  std::erase_if(answer, is_space);
  if (answer.size() > 2 && is_word(answer[0]) && !is_digit(answer[0]) && answer[1] == '=') {
    answer.erase(0, 2);
  }
  while (!answer.empty() &&
         (answer.back() == '.' || answer.back() == ',' || answer.back() == ';')) {
    answer.pop_back();
  }
  if (const auto number = canonical_number(answer)) {
    return *number;
  }
  return write_fractions(answer);
}

bool holds_answer(std::string_view text, std::string_view normalized_answer) {
  if (normalized_answer.empty()) {
    return false;
  }
  if (canonical_number(normalized_answer)) {
    return std::ranges::any_of(numbers(text), [&](std::string_view number) {
      return normalize_answer(number) == normalized_answer;
    });
  }
  const std::string spaced = write_fractions(normalize_symbols(text));
  std::string whole;  // without white space
  std::vector<bool> follows_space;
  bool after_space = false;
  for (const char c : spaced) {
    if (is_space(c)) {
      after_space = true;
      continue;
    }
    whole += c;
    follows_space.push_back(after_space);
    after_space = false;
  }
  const auto joins = [&](std::size_t place) {  // whether one word goes on across its left edge
    return place > 0 && place < whole.size() && !follows_space[place] &&
           is_word(whole[place - 1]) && is_word(whole[place]);
  };
  for (std::size_t at = whole.find(normalized_answer); at != std::string::npos;
       at = whole.find(normalized_answer, at + 1)) {
    if (!joins(at) && !joins(at + normalized_answer.size())) {
      return true;
    }
  }
  return false;
}

}  // namespace bifocal
