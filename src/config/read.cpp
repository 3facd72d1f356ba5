// Reads TOML with toml++, applies overrides and checks the whole.
#include "config/read.h"

#include <cstdint>
#include <sstream>

#include <fmt/format.h>

#include "config/options.h"
#include "core/error.h"
#include "core/file.h"
#include "core/toml.h"

namespace bifocal {

namespace {

std::string line_of(std::string_view origin, const toml::source_region& place) {
  return fmt::format("{}, line {}", origin, place.begin.line);
}

[[noreturn]] void fail_type(const Option& option, toml::node_type found, std::string_view place) {
  std::ostringstream kind;
  kind << found;
  fail("[config] {}: wanted {}, got a value of TOML type {} ({})",
       option.key,
       describe_values(option),
       kind.str(),
       place);
}

std::vector<std::string> convert_list(const toml::array& array,
                                      const Option& option,
                                      std::string_view place) {
  std::vector<std::string> texts;
  for (const toml::node& element : array) {
    const auto* text = element.as_string();
    if (text == nullptr) {
      fail_type(option, element.type(), place);
    }
    texts.push_back(text->get());
  }
  return texts;
}

// A TOML value as one of ours; throws for kinds that no option has.
OptionValue convert(const toml::node& node, const Option& option, std::string_view place) {
  if (const auto* value = node.as_boolean()) {
    return value->get();
  }
  if (const auto* value = node.as_integer()) {
    return value->get();
  }
  if (const auto* value = node.as_floating_point()) {
    return value->get();
  }
  if (const auto* value = node.as_string()) {
    return value->get();
  }
  if (const auto* value = node.as_array()) {
    return convert_list(*value, option, place);
  }
  fail_type(option, node.type(), place);
}

void apply_section(const std::string& name,
                   const toml::table& table,
                   std::string_view origin,
                   RunConfig& config) {
  for (const auto& [key, node] : table) {
    const std::string full = fmt::format("{}.{}", name, key.str());
    const std::string place = line_of(origin, key.source());
    const Option* option = find_option(full);
    BIFOCAL_REQUIRE(option != nullptr,
                    "[config] unknown key {} ({}): did you mean {}?",
                    full,
                    place,
                    nearest_key(full));
    set_value(*option, convert(node, *option, place), place, config);
  }
}

void apply_toml(std::string_view text, std::string_view origin, RunConfig& config) {
  toml::table document;
  try {
    document = toml::parse(text);
  } catch (const toml::parse_error& error) {
    fail("[config] wanted a TOML file, got: {} ({})",
         error.description(),
         line_of(origin, error.source()));
  }
  for (const auto& [key, node] : document) {
    const std::string name{key.str()};
    const std::string place = line_of(origin, key.source());
    BIFOCAL_REQUIRE(node.is_table(),
                    "[config] unknown key {} ({}): keys stand in sections, did you mean {}?",
                    name,
                    place,
                    nearest_key(name));
    const std::string section = nearest_section(name);
    BIFOCAL_REQUIRE(section == name,
                    "[config] unknown section [{}] ({}): did you mean [{}]?",
                    name,
                    place,
                    section);
    apply_section(name, *node.as_table(), origin, config);
  }
}

void check_stage(std::string_view name, const StageConfig& stage) {
  BIFOCAL_REQUIRE(stage.schedule != "cosine" || stage.final_rate <= stage.rate,
                  "[config] {0}.final_rate: wanted at most {0}.rate = {1}, got {2}: a cosine "
                  "schedule falls",
                  name,
                  stage.rate,
                  stage.final_rate);
}

}  // namespace

RunConfig read_run_config(const std::vector<std::string>& files,
                          const std::vector<Override>& overrides) {
  RunConfig config;
  for (const std::string& file : files) {
    apply_toml(read_file(file), file, config);
  }
  constexpr std::string_view kCommandLine = "command line";
  for (const Override& given : overrides) {
    const Option* option = find_option(given.key);
    BIFOCAL_REQUIRE(option != nullptr,
                    "[config] unknown key {} ({}): did you mean {}?",
                    given.key,
                    kCommandLine,
                    nearest_key(given.key));
    set_value(*option, parse_value(*option, given.texts, kCommandLine), kCommandLine, config);
  }
  check_run_config(config);
  return config;
}

RunConfig parse_run_config(std::string_view text, std::string_view origin) {
  RunConfig config;
  apply_toml(text, origin, config);
  check_run_config(config);
  return config;
}

std::string to_toml(RunConfig config) {
  std::string text;
  for (const OptionSection& section : option_sections()) {
    text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section.name);
    for (const Option& option : section.options) {
      const std::string name = option.key.substr(section.name.size() + 1);
      text += fmt::format("{} = {}\n", name, format_toml(get_value(option, config)));
    }
  }
  return text;
}

void check_run_config(const RunConfig& config) {
  BIFOCAL_REQUIRE(
      config.run.heartbeat_seconds == 0.0 || config.run.heartbeat_seconds >= 2.0,
      "[config] run.heartbeat_seconds is {}, wanted 0 or at least 2: ranks look at each "
      "other five times a second",
      config.run.heartbeat_seconds);
  check_stage("align", config.align);
  check_stage("distill", config.distill);
  check_stage("pretrain", config.pretrain);
  BIFOCAL_REQUIRE(config.mesh.data > 0 || config.mesh.sequence > 0,
                  "[config] mesh.data and mesh.sequence are both 0: each would be what the other "
                  "leaves, set one of them");
  BIFOCAL_REQUIRE(config.data.train.empty() || config.data.mixture.empty(),
                  "[config] data.train and data.mixture both name data: wanted one of them, so "
                  "leave one out (--data.train \"\" empties the list of a file)");
  const RunConfig::Memory& memory = config.memory;
  BIFOCAL_REQUIRE(
      memory.kept_layers == 0 || (memory.recompute != "auto" && memory.recompute != "none"),
      "[config] memory.kept_layers is {}, wanted 0 with memory.recompute = \"{}\": {}; set it to "
      "0, "
      "or memory.recompute to light, mlp, mixer or block",
      memory.kept_layers,
      memory.recompute,
      memory.recompute == "auto" ? "auto chooses the layers itself"
                                 : "no level keeps more than none");
}

}  // namespace bifocal
