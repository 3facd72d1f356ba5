// README.md of an exported model.
#include "hf/model_card.h"

#include <sstream>

#include <fmt/format.h>

#include "core/file.h"
#include "hf/hf_config.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

std::string trim(const std::string& text) {
  constexpr const char* kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  return begin == std::string::npos ? std::string()
                                    : text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// `license: x` between the two lines of dashes that open a model card.
std::string front_matter_licence(const std::string& card) {
  std::istringstream lines(card);
  std::string line;
  std::getline(lines, line);
  if (trim(line) != "---") {
    return {};
  }
  constexpr std::string_view kKey = "license:";
  while (std::getline(lines, line) && trim(line) != "---") {
    if (line.starts_with(kKey)) {
      return trim(line.substr(kKey.size()));
    }
  }
  return {};
}

std::string first_line(const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (!trim(line).empty()) {
      return trim(line);
    }
  }
  return {};
}

// The last name of a path, with or without a slash at its end.
std::string base_name(const fs::path& path) {
  const fs::path whole = fs::absolute(path).lexically_normal();
  return (whole.has_filename() ? whole : whole.parent_path()).filename().string();
}

// One line for each run of layers with equal settings.
std::string mixer_table(const std::vector<MixerSettings>& mixers) {
  std::string text = "| layers | mixer |\n|---|---|\n";
  for (std::size_t begin = 0; begin < mixers.size();) {
    std::size_t end = begin + 1;
    while (end < mixers.size() && mixers[end] == mixers[begin]) {
      ++end;
    }
    const std::string layers =
        end - begin == 1 ? std::to_string(begin) : fmt::format("{} to {}", begin, end - 1);
    text += fmt::format("| {} | {} |\n", layers, describe(mixers[begin]));
    begin = end;
  }
  return text;
}

}  // namespace

std::string stated_licence(const fs::path& directory) {
  if (fs::is_regular_file(directory / "README.md")) {
    std::string licence = front_matter_licence(read_file(directory / "README.md"));
    if (!licence.empty()) {
      return licence;
    }
  }
  for (const char* name : {"LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE"}) {
    if (fs::is_regular_file(directory / name)) {
      return first_line(read_file(directory / name));
    }
  }
  return {};
}

std::string model_card(const ExportOptions& options) {
  const std::string teacher = base_name(options.teacher);
  const std::string licence = stated_licence(options.teacher);
  const auto parameters = static_cast<double>(ParameterTable(options.model).total());
  std::string card = fmt::format("# {}\n\n", base_name(options.output));
  card += fmt::format("A model of type {}. ", name_of(options.model.family));
  card += is_student(options.model)
              ? "Its attention layers were replaced by bifocal mixers: attention over a window of "
                "recent tokens, a recurrent state for what lies further back, or both.\n\n"
              : "Every layer attends to the whole context.\n\n";
  card += fmt::format("- Teacher: {}\n", teacher);
  card += fmt::format("- Licence of the teacher: {}\n",
                      licence.empty() ? "not stated in the teacher's directory" : licence);
  card += fmt::format(
      "- Parameters: {:.2f} million, stored as {}\n", parameters / 1e6, name_of(options.dtype));
  card += fmt::format("- Weights: {}\n", options.origin);
  card += fmt::format("- Made by bifocal at commit {}\n\n", options.commit);
  card += "## Mixers\n\n" + mixer_table(options.model.mixers);
  card +=
      "\nconfig.json lists the mixer of every layer. Tensors carry the names of the base model; "
      "new ones are called model.layers.N.mixer.*.\n";
  if (is_student(options.model)) {
    card +=
        "\n## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)\n"
        "tokenizer = AutoTokenizer.from_pretrained(PATH)\n```\n\nPATH is this directory, whose "
        "Python files are the code. The cache of generate() does not grow with the context, save "
        "in layers of full attention.\n";
  }
  if (!options.configuration.empty()) {
    card += "\n## Run configuration\n\n```toml\n" + options.configuration;
    card += options.configuration.ends_with('\n') ? "```\n" : "\n```\n";
  }
  return card;
}

}  // namespace bifocal
