// Typed access to the keys of a JSON object; null counts as absent.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

namespace bifocal {

using OrderedJson = nlohmann::ordered_json;

// Parses an object; throws Error "[config] WHERE ..." for anything else, for nesting deeper than
// 64 and for keys that stand twice in one object.
OrderedJson parse_json_object(const std::string& text, const std::string& where);

// One object of a file that `where` names. Every method throws Error naming file and key when the
// value has another type.
class JsonFields {
 public:
  JsonFields(const OrderedJson& object, std::string where);

  // Null where absent.
  const OrderedJson* find(const std::string& key) const;

  bool has(const std::string& key) const { return find(key) != nullptr; }

  std::optional<std::int64_t> find_integer(const std::string& key) const;
  std::optional<double> find_number(const std::string& key) const;
  std::optional<bool> find_bool(const std::string& key) const;
  std::optional<std::string> find_string(const std::string& key) const;

  // Present, and from `least` to `most`.
  std::int64_t integer(const std::string& key,
                       std::int64_t least,
                       std::int64_t most = 1LL << 30) const;
  // Present, finite and above 0.
  double positive(const std::string& key) const;
  std::string string(const std::string& key) const;

  bool is_true(const std::string& key) const { return find_bool(key).value_or(false); }

  const std::string& where() const { return where_; }

 private:
  const OrderedJson& object_;
  std::string where_;
};

}  // namespace bifocal
