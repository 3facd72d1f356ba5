// The table of options: what the file, the command line, --help and the documentation derive from.
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "config/run_config.h"

namespace bifocal {

// Numbers that an option accepts. Infinities and NaN are never accepted.
struct ValueRange {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool excludes_least = false;
  bool excludes_most = false;

  bool contains(double value) const;
};

using OptionValue = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

// Where a value of type T lives in a RunConfig.
template <class T>
using Field = std::function<T&(RunConfig&)>;

using AnyField = std::variant<Field<bool>,
                              Field<std::int64_t>,
                              Field<double>,
                              Field<std::string>,
                              Field<std::vector<std::string>>>;

struct Option {
  std::string key;  // "section.name"
  AnyField field;
  std::string help;                  // one line
  ValueRange range{};                // of numbers
  std::string unit{};                // "tokens"; empty: a plain number or word
  std::vector<std::string> words{};  // allowed texts; empty: any
};

struct OptionSection {
  std::string name;
  std::string help;  // a sentence without its full stop
  std::vector<Option> options;
};

// Every option, in the order of the documentation (run_config.cpp).
const std::vector<OptionSection>& option_sections();

// nullptr for a key that is not declared.
const Option* find_option(std::string_view key);

// The declared key with the fewest edits (insert, delete, replace) from this one.
std::string nearest_key(std::string_view key);
std::string nearest_section(std::string_view name);

// What a value must be: "an integer of at least 1 (tokens)", "one of new, mixer".
std::string describe_values(const Option& option);

// Whether the option holds any number of texts.
bool is_list(const Option& option);

// The field's present value.
OptionValue get_value(const Option& option, RunConfig& config);

// Sets the field. An integer is accepted for a real. Throws Error naming key, wanted and given
// value and `origin` ("x.toml, line 3") when the value has the wrong type or is out of range.
void set_value(const Option& option,
               const OptionValue& value,
               std::string_view origin,
               RunConfig& config);

// Reads what the command line gave: one text, or for a list any number (a single empty text is the
// empty list). Throws Error as set_value does.
OptionValue parse_value(const Option& option,
                        const std::vector<std::string>& texts,
                        std::string_view origin);

// The value as TOML, which reads back equal: true, 7, 1e-05, "text", ["a", "b"].
std::string format_toml(const OptionValue& value);

// "a, b, c" with separator ", ". (fmt::join of strings draws false warnings from gcc 12.)
std::string join(const std::vector<std::string>& texts, std::string_view separator);

}  // namespace bifocal
