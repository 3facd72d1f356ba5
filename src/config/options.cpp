// Options: checking, parsing and printing of values, and the search for the nearest key.
#include "config/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

std::int64_t edit_distance(std::string_view a, std::string_view b) {
  // One row of the table of Wagner and Fischer at a time.
  std::vector<std::int64_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::int64_t diagonal = row[0];
    row[0] = static_cast<std::int64_t>(i) + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::int64_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::string nearest(std::string_view name, const std::vector<std::string>& known) {
  return *std::min_element(known.begin(), known.end(), [&](const auto& a, const auto& b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
}

std::string describe_range(const ValueRange& range) {
  const std::string least =
      std::isinf(range.least)
          ? ""
          : fmt::format("{} {}", range.excludes_least ? "above" : "of at least", range.least);
  const std::string most =
      std::isinf(range.most)
          ? ""
          : fmt::format("{} {}", range.excludes_most ? "below" : "of at most", range.most);
  return fmt::format("{}{}{}", least, least.empty() || most.empty() ? "" : " and ", most);
}

template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stopped != end) {
    return std::nullopt;
  }
  return value;
}

// For command lines: a word that is no number stays a text, which set_value then refuses.
OptionValue parse_real(const std::string& text) {
  const auto value = parse_number<double>(text);
  return value ? OptionValue(*value) : OptionValue(text);
}

OptionValue parse_integer(const std::string& text) {
  const auto value = parse_number<std::int64_t>(text);
  return value ? OptionValue(*value) : OptionValue(text);
}

OptionValue parse_switch(const std::string& text) {
  if (text == "true" || text == "false") {
    return text == "true";
  }
  return text;
}

std::string quote(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (code < 0x20 || code == 0x7f) {
      quoted += fmt::format("\\u{:04X}", code);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string format_real(double value) {
  std::string text = fmt::format("{}", value);
  const bool looks_integer = text.find_first_of(".en") == std::string::npos;
  return looks_integer ? text + ".0" : text;
}

[[noreturn]] void fail_value(const Option& option,
                             const OptionValue& value,
                             std::string_view origin) {
  fail("[config] {}: wanted {}, got {} ({})",
       option.key,
       describe_values(option),
       format_toml(value),
       origin);
}

}  // namespace

bool ValueRange::contains(double value) const {
  const bool is_above = excludes_least ? value > least : value >= least;
  const bool is_below = excludes_most ? value < most : value <= most;
  return std::isfinite(value) && is_above && is_below;
}

const Option* find_option(std::string_view key) {
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      if (option.key == key) {
        return &option;
      }
    }
  }
  return nullptr;
}

std::string nearest_key(std::string_view key) {
  std::vector<std::string> keys;
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      keys.push_back(option.key);
    }
  }
  return nearest(key, keys);
}

std::string nearest_section(std::string_view name) {
  std::vector<std::string> names;
  for (const OptionSection& section : option_sections()) {
    names.push_back(section.name);
  }
  return nearest(name, names);
}

bool is_list(const Option& option) {
  return std::holds_alternative<Field<std::vector<std::string>>>(option.field);
}

std::string describe_values(const Option& option) {
  if (!option.words.empty()) {
    return fmt::format("one of {}", join(option.words, ", "));
  }
  const std::string range = describe_range(option.range);
  const std::string number =
      fmt::format("{}{}{}",
                  range.empty() ? "" : " ",
                  range,
                  option.unit.empty() ? "" : fmt::format(" ({})", option.unit));
  return std::visit(
      Overloaded{
          [](const Field<bool>&) { return std::string("true or false"); },
          [&](const Field<std::int64_t>&) { return fmt::format("an integer{}", number); },
          [&](const Field<double>&) { return fmt::format("a number{}", number); },
          [](const Field<std::string>&) { return std::string("a text"); },
          [](const Field<std::vector<std::string>>&) { return std::string("a list of texts"); }},
      option.field);
}

OptionValue get_value(const Option& option, RunConfig& config) {
  return std::visit([&](const auto& field) { return OptionValue(field(config)); }, option.field);
}

void set_value(const Option& option,
               const OptionValue& value,
               std::string_view origin,
               RunConfig& config) {
  const auto accept = [&]<class T>(const Field<T>& field) {
    const T* given = std::get_if<T>(&value);
    bool is_valid = given != nullptr;
    if constexpr (std::is_arithmetic_v<T>) {
      is_valid = is_valid && option.range.contains(static_cast<double>(*given));
    }
    if constexpr (std::is_same_v<T, std::string>) {
      const auto& words = option.words;
      is_valid = is_valid &&
                 (words.empty() || std::find(words.begin(), words.end(), *given) != words.end());
    }
    if (!is_valid) {
      fail_value(option, value, origin);
    }
    field(config) = *given;
  };
  const auto* integer = std::get_if<std::int64_t>(&value);
  if (integer != nullptr && std::holds_alternative<Field<double>>(option.field)) {
    set_value(option, static_cast<double>(*integer), origin, config);
    return;
  }
  std::visit(accept, option.field);
}

OptionValue parse_value(const Option& option,
                        const std::vector<std::string>& texts,
                        std::string_view origin) {
  if (is_list(option)) {
    const bool is_empty = texts.size() == 1 && texts.front().empty();
    return is_empty ? std::vector<std::string>{} : texts;
  }
  BIFOCAL_REQUIRE(texts.size() == 1,
                  "[config] {}: wanted one value, got {} ({}): give it once",
                  option.key,
                  texts.size(),
                  origin);
  const std::string& text = texts.front();
  return std::visit(Overloaded{[&](const Field<bool>&) { return parse_switch(text); },
                               [&](const Field<std::int64_t>&) { return parse_integer(text); },
                               [&](const Field<double>&) { return parse_real(text); },
                               [&](const auto&) { return OptionValue(text); }},
                    option.field);
}

std::string format_toml(const OptionValue& value) {
  return std::visit(Overloaded{[](bool v) { return std::string(v ? "true" : "false"); },
                               [](std::int64_t v) { return fmt::format("{}", v); },
                               [](double v) { return format_real(v); },
                               [](const std::string& v) { return quote(v); },
                               [](const std::vector<std::string>& v) {
                                 std::vector<std::string> quoted;
                                 quoted.reserve(v.size());
                                 for (const std::string& text : v) {
                                   quoted.push_back(quote(text));
                                 }
                                 return fmt::format("[{}]", join(quoted, ", "));
                               }},
                    value);
}

std::string join(const std::vector<std::string>& texts, std::string_view separator) {
  std::string joined;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    joined += i == 0 ? "" : separator;
    joined += texts[i];
  }
  return joined;
}

}  // namespace bifocal
