// Reads mixture files with toml++.
#include "data/mixture.h"

#include <cmath>
#include <set>
#include <sstream>

#include <fmt/format.h>

#include "core/error.h"
#include "core/file.h"
#include "core/toml.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

std::string line_of(std::string_view origin, const toml::node& node) {
  return fmt::format("{}, line {}", origin, node.source().begin.line);
}

std::string type_of(const toml::node& node) {
  std::ostringstream type;
  type << node.type();
  return type.str();
}

std::string text_of(const toml::node& node, std::string_view key, std::string_view origin) {
  const auto* text = node.as_string();
  BIFOCAL_REQUIRE(text != nullptr && !text->get().empty(),
                  "[mixture] {} of a source: wanted a text that is not empty, got {} ({})",
                  key,
                  text == nullptr ? "a value of TOML type " + type_of(node) : "an empty one",
                  line_of(origin, node));
  return text->get();
}

std::vector<std::string> paths_of(const toml::node& node,
                                  std::string_view origin,
                                  const fs::path& directory) {
  std::vector<std::string> paths;
  const auto add = [&](const toml::node& text) {
    paths.push_back((directory / text_of(text, "paths", origin)).lexically_normal().string());
  };
  if (const toml::array* list = node.as_array()) {
    for (const toml::node& element : *list) {
      add(element);
    }
  } else {
    add(node);
  }
  BIFOCAL_REQUIRE(!paths.empty(),
                  "[mixture] paths of a source: wanted token shards or directories of them, got an "
                  "empty list ({})",
                  line_of(origin, node));
  return paths;
}

double weight_of(const toml::node& node, std::string_view origin) {
  BIFOCAL_REQUIRE(node.is_number(),
                  "[mixture] weight of a source: wanted a number, got a value of TOML type {} ({})",
                  type_of(node),
                  line_of(origin, node));
  const double weight = *node.value<double>();
  BIFOCAL_REQUIRE(std::isfinite(weight) && weight >= 0.0,
                  "[mixture] weight of a source: wanted a number of at least 0, got {} ({})",
                  weight,
                  line_of(origin, node));
  return weight;
}

MixtureSource source_of(const toml::table& table,
                        std::string_view origin,
                        const fs::path& directory) {
  const auto need = [&](std::string_view key) -> const toml::node& {
    const toml::node* node = table.get(key);
    BIFOCAL_REQUIRE(node != nullptr,
                    "[mixture] a source has no {} ({}): it needs name, paths and weight",
                    key,
                    line_of(origin, table));
    return *node;
  };
  for (const auto& [key, node] : table) {
    BIFOCAL_REQUIRE(key == "name" || key == "paths" || key == "weight",
                    "[mixture] unknown key {} ({}): a source has name, paths and weight",
                    key.str(),
                    line_of(origin, node));
  }
  return {.name = text_of(need("name"), "name", origin),
          .paths = paths_of(need("paths"), origin, directory),
          .weight = weight_of(need("weight"), origin)};
}

toml::table parse(std::string_view text, std::string_view origin) {
  try {
    return toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail("[mixture] wanted a TOML file, got: {} ({}, line {})",
         error.description(),
         origin,
         error.source().begin.line);
  }
}

}  // namespace

Mixture parse_mixture(std::string_view text, std::string_view origin, const fs::path& directory) {
  const toml::table document = parse(text, origin);
  for (const auto& [key, node] : document) {
    BIFOCAL_REQUIRE(key == "source",
                    "[mixture] unknown key {} ({}): a mixture has tables [[source]] only",
                    key.str(),
                    line_of(origin, node));
  }
  const toml::node* node = document.get("source");
  const toml::array* list = node == nullptr ? nullptr : node->as_array();
  BIFOCAL_REQUIRE(list != nullptr && !list->empty() && list->is_homogeneous<toml::table>(),
                  "[mixture] {} names no source: wanted a table [[source]] for each",
                  origin);
  Mixture mixture;
  std::set<std::string> names;
  double sum = 0.0;
  for (const toml::node& element : *list) {
    MixtureSource source = source_of(*element.as_table(), origin, directory);
    BIFOCAL_REQUIRE(names.insert(source.name).second,
                    "[mixture] two sources have the name {} ({}): rename one",
                    source.name,
                    line_of(origin, element));
    sum += source.weight;
    mixture.sources.push_back(std::move(source));
  }
  BIFOCAL_REQUIRE(std::isfinite(sum) && sum > 0.0,
                  "[mixture] the weights in {} sum to {}: give at least one source a positive one",
                  origin,
                  sum);
  return mixture;
}

Mixture read_mixture(const fs::path& file) {
  Mixture mixture = parse_mixture(read_file(file), file.string(), file.parent_path());
  for (const MixtureSource& source : mixture.sources) {
    for (const std::string& path : source.paths) {
      BIFOCAL_REQUIRE(fs::exists(path),
                      "[mixture] source {} of {} names {}, which does not exist: make it with "
                      "`bifocal tokenize`, or correct the path (paths are relative to the mixture "
                      "file)",
                      source.name,
                      file.string(),
                      path);
    }
  }
  return mixture;
}

std::string canonical_text(const Mixture& mixture) {
  std::string text;
  for (const MixtureSource& source : mixture.sources) {
    text += fmt::format("{}:{} {:a}", source.name.size(), source.name, source.weight);
    for (const std::string& path : source.paths) {
      text += fmt::format(" {}:{}", path.size(), path);
    }
    text += '\n';
  }
  return text;
}

}  // namespace bifocal
