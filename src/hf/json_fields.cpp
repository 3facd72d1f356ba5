// Typed access to the keys of a JSON object.
#include "hf/json_fields.h"

#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "hf/strict_json.h"

namespace bifocal {

OrderedJson parse_json_object(const std::string& text, const std::string& where) {
  return parse_strict_json<OrderedJson>(text, fmt::format("[config] {}", where), {});
}

JsonFields::JsonFields(const OrderedJson& object, std::string where)
    : object_(object), where_(std::move(where)) {
  BIFOCAL_REQUIRE(object.is_object(), "[config] {}: wanted a JSON object", where_);
}

const OrderedJson* JsonFields::find(const std::string& key) const {
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<std::int64_t> JsonFields::find_integer(const std::string& key) const {
  const OrderedJson* value = find(key);
  if (value == nullptr) {
    return std::nullopt;
  }
  const bool fits = value->is_number_integer() &&
                    (!value->is_number_unsigned() ||
                     value->get<std::uint64_t>() <=
                         static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
  BIFOCAL_REQUIRE(
      fits, "[config] {}: {} must be a whole number, got {}", where_, key, shown(*value));
  return value->get<std::int64_t>();
}

std::optional<double> JsonFields::find_number(const std::string& key) const {
  const OrderedJson* value = find(key);
  if (value == nullptr) {
    return std::nullopt;
  }
  BIFOCAL_REQUIRE(
      value->is_number(), "[config] {}: {} must be a number, got {}", where_, key, shown(*value));
  return value->get<double>();
}

std::optional<bool> JsonFields::find_bool(const std::string& key) const {
  const OrderedJson* value = find(key);
  if (value == nullptr) {
    return std::nullopt;
  }
  BIFOCAL_REQUIRE(value->is_boolean(),
                  "[config] {}: {} must be true or false, got {}",
                  where_,
                  key,
                  shown(*value));
  return value->get<bool>();
}

std::optional<std::string> JsonFields::find_string(const std::string& key) const {
  const OrderedJson* value = find(key);
  if (value == nullptr) {
    return std::nullopt;
  }
  BIFOCAL_REQUIRE(
      value->is_string(), "[config] {}: {} must be a string, got {}", where_, key, shown(*value));
  return value->get<std::string>();
}

std::int64_t JsonFields::integer(const std::string& key,
                                 std::int64_t least,
                                 std::int64_t most) const {
  const std::optional<std::int64_t> value = find_integer(key);
  BIFOCAL_REQUIRE(value.has_value(), "[config] {} lacks {}", where_, key);
  BIFOCAL_REQUIRE(*value >= least && *value <= most,
                  "[config] {}: {} must lie between {} and {}, got {}",
                  where_,
                  key,
                  least,
                  most,
                  *value);
  return *value;
}

double JsonFields::positive(const std::string& key) const {
  const std::optional<double> value = find_number(key);
  BIFOCAL_REQUIRE(value.has_value(), "[config] {} lacks {}", where_, key);
  BIFOCAL_REQUIRE(std::isfinite(*value) && *value > 0.0,
                  "[config] {}: {} must be above 0, got {}",
                  where_,
                  key,
                  *value);
  return *value;
}

std::string JsonFields::string(const std::string& key) const {
  const std::optional<std::string> value = find_string(key);
  BIFOCAL_REQUIRE(value.has_value(), "[config] {} lacks {}", where_, key);
  return *value;
}

}  // namespace bifocal
