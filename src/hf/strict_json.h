// JSON from files that somebody else wrote, perhaps to do harm.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace bifocal {

struct JsonLimits {
  int depth = 64;  // objects and arrays inside each other; what walks a value recurses as deep
  std::size_t items = std::numeric_limits<std::size_t>::max();  // in one array
  std::size_t key_bytes = 1024;
};

// Parses an object. Throws Error "WHERE ..." for text that is not one, holds a NUL byte (where a
// parser may stop and a reader does not), exceeds a limit, or names a key twice in one object (of
// which parsers take either). Json: nlohmann::json or ordered_json. Nothing that a limit forbids is
// kept in memory.
template <class Json>
Json parse_strict_json(std::string_view text, const std::string& where, const JsonLimits& limits) {
  BIFOCAL_REQUIRE(text.find('\0') == std::string_view::npos, "{} holds a NUL byte", where);
  using Event = typename Json::parse_event_t;
  std::vector<std::set<std::string>> keys;  // of the open objects, by depth
  std::vector<std::size_t> items;           // of the open arrays and objects, by depth

  const auto check_key = [&](std::size_t level, const std::string& key) {
    BIFOCAL_REQUIRE(key.size() <= limits.key_bytes && key.find('\0') == std::string::npos,
                    "{}: a key of {} bytes is over the limit of {} or holds a NUL",
                    where,
                    key.size(),
                    limits.key_bytes);
    BIFOCAL_REQUIRE(keys[level - 1].insert(key).second,
                    "{} names \"{}\" twice in one object: which one counts?",
                    where,
                    key);
    items[level - 1] = 0;  // an object's entries are bounded by their keys
  };
  const auto check = [&](int depth, Event event, Json& parsed) {
    const auto level = static_cast<std::size_t>(depth);
    if (event == Event::key) {
      check_key(level, parsed.template get_ref<const std::string&>());
      return true;
    }
    const bool opens = event == Event::object_start || event == Event::array_start;
    if (opens) {
      BIFOCAL_REQUIRE(depth < limits.depth,
                      "{} nests objects and lists more than {} deep",
                      where,
                      limits.depth);
      BIFOCAL_REQUIRE(depth > 0 || event == Event::object_start, "{}: wanted a JSON object", where);
      keys.resize(std::max(keys.size(), level + 1));
      items.resize(keys.size());
      keys[level].clear();
      items[level] = 0;
    }
    if ((opens || event == Event::value) && level > 0) {
      BIFOCAL_REQUIRE(++items[level - 1] <= limits.items,
                      "{} holds a list of more than {} items",
                      where,
                      limits.items);
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text.begin(), text.end(), check);
  } catch (const typename Json::exception& error) {
    constexpr std::size_t kMostReason = 300;  // the parser quotes a token whole, however long
    fail("{} is not JSON: {}", where, std::string_view(error.what()).substr(0, kMostReason));
  }
  BIFOCAL_REQUIRE(json.is_object(), "{}: wanted a JSON object", where);
  return json;
}

// A value's text for a message, cut where it is long.
template <class Json>
std::string shown(const Json& value) {
  constexpr std::size_t kMost = 200;
  std::string text = value.dump(-1, ' ', true);
  if (text.size() > kMost) {
    text.resize(kMost);
    text += "...";
  }
  return text;
}

// The bytes of a file that should be small. Throws Error "WHERE ..." for a missing, irregular or
// larger one.
std::string read_small_file(const std::filesystem::path& path,
                            std::size_t most,
                            const std::string& where);

}  // namespace bifocal
