// `bifocal memory`: what the students of any model cost per sequence, beside the model itself.
#include "core/memory.h"

#include <algorithm>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "core/error.h"
#include "core/log.h"
#include "hf/model_shape.h"
#include "plan/cache_memory.h"
#include "plan/parameter_table.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;

struct MemoryOptions {
  std::string path;
  std::vector<std::string> presets;
  std::vector<std::string> mixers;
  std::int64_t budget = 576;
  std::int64_t context = 40960;
  std::vector<double> cards{80.0, 141.0};
  bool wants_json = false;
};

// One line of the table: a student, or the model as it is.
struct MemoryRow {
  std::string name;
  std::string settings;
  std::int64_t least_budget = 0;  // above 0: the preset does not fit, and this would
  double sequence_bytes = 0.0;
  std::optional<std::int64_t> parameters;  // nothing where they cannot be counted
  std::int64_t new_parameters = 0;
  std::vector<MixerSettings> mixers;  // of a student
};

std::string describe_layers(const std::vector<MixerSettings>& mixers) {
  const bool alike = std::all_of(mixers.begin(), mixers.end(), [&](const MixerSettings& mixer) {
    return mixer == mixers.front();
  });
  return alike ? describe(mixers.front()) : "layers differ (see below)";
}

MemoryRow student_row(const ModelShape& shape,
                      const std::string& name,
                      const std::vector<MixerSettings>& mixers,
                      std::int64_t context) {
  ModelConfig model = shape.model;
  model.mixers = mixers;
  MemoryRow row;
  row.name = name;
  row.settings = describe_layers(mixers);
  row.sequence_bytes = sequence_cache_bytes(model, context);
  row.mixers = mixers;
  const ParameterTable table(model);
  for (const Parameter& parameter : table.parameters()) {
    row.new_parameters += parameter.is_new() ? parameter.size() : 0;
  }
  if (shape.has_dense_mlp) {
    row.parameters = table.total();
  }
  return row;
}

MemoryRow native_row(const ModelShape& shape, const NativeLayout& layout, std::int64_t context) {
  const auto count = [&](LayerKind kind) {
    return std::count(layout.layers.begin(), layout.layers.end(), kind);
  };
  MemoryRow row;
  row.name = "as it is";
  for (const auto& [kind, text] : {std::pair(LayerKind::full, "full"),
                                   std::pair(LayerKind::sliding, "sliding"),
                                   std::pair(LayerKind::linear, "linear")}) {
    if (count(kind) > 0) {
      row.settings += fmt::format("{}{} {}", row.settings.empty() ? "" : ", ", count(kind), text);
    }
  }
  row.settings += fmt::format(" layers, {} tokens of context", format_count(context));
  row.sequence_bytes = native_cache_bytes(layout, shape.model, context);
  if (shape.has_dense_mlp && layout.is_full_attention()) {
    row.parameters = ParameterTable(shape.model).total();
  }
  return row;
}

std::vector<MemoryRow> make_rows(const ModelShape& shape, const MemoryOptions& options) {
  std::vector<MemoryRow> rows;
  if (shape.native.has_value()) {
    rows.push_back(native_row(shape, *shape.native, options.context));
  }
  if (shape.is_student) {
    rows.push_back(student_row(shape, "this student", shape.model.mixers, options.context));
  }
  for (const std::string& preset : options.presets.empty() ? preset_names() : options.presets) {
    const std::int64_t least = least_budget(preset, shape.model);
    if (options.budget < least) {
      MemoryRow row;
      row.name = preset;
      row.least_budget = least;
      rows.push_back(row);
      continue;
    }
    rows.push_back(student_row(shape,
                               preset,
                               make_mixers(preset, options.budget, options.mixers, shape.model),
                               options.context));
  }
  return rows;
}

std::int64_t count_sequences(const MemoryRow& row, double card_gib) {
  return sequences_that_fit(
      card_gib * kGiB, 2.0 * static_cast<double>(row.parameters.value_or(0)), row.sequence_bytes);
}

// "4.0225 B", "28.0 M", "1,152"
std::string format_parameters(std::int64_t count) {
  const auto value = static_cast<double>(count);
  if (count >= 1'000'000'000) {
    return fmt::format("{:.4f} B", value / 1e9);
  }
  return count >= 100'000 ? fmt::format("{:.1f} M", value / 1e6) : format_count(count);
}

std::string format_tokens(double tokens) {
  const auto whole = static_cast<std::int64_t>(tokens);
  return tokens == static_cast<double>(whole) ? format_count(whole) : fmt::format("{:.2f}", tokens);
}

void print_table(const ModelShape& shape,
                 const std::vector<MemoryRow>& rows,
                 const MemoryOptions& options) {
  const ModelConfig& model = shape.model;
  const auto layers = static_cast<double>(model.layers);
  fmt::print(
      "{}: {} layers, width {}, MLP {}, vocabulary {} ({}), {} query and {} key-value heads "
      "of {}\n",
      shape.type,
      model.layers,
      format_count(model.hidden),
      format_count(model.intermediate),
      format_count(model.vocabulary),
      model.tied ? "tied" : "untied",
      model.heads,
      model.kv_heads,
      model.head_dim);
  fmt::print(
      "A cached token takes {} in a layer (bf16). Tokens and bytes of a layer are means.\n\n",
      format_bytes(cached_token_bytes(model)));
  fmt::print("{:<18}{:>10}{:>12}{:>14}{:>12}{:>10}",
             "model",
             "tokens",
             "a layer",
             "a sequence",
             "parameters",
             "new");
  for (const double card : options.cards) {
    fmt::print("{:>12}", fmt::format("in {:g} GiB", card));
  }
  fmt::print("  layers\n");
  for (const MemoryRow& row : rows) {
    if (row.least_budget > 0) {
      fmt::print("{:<18}does not fit {} tokens a layer: needs a budget of at least {}\n",
                 row.name,
                 options.budget,
                 row.least_budget);
      continue;
    }
    const double layer_bytes = row.sequence_bytes / layers;
    fmt::print("{:<18}{:>10}{:>12}{:>14}{:>12}{:>10}",
               row.name,
               format_tokens(layer_bytes / cached_token_bytes(model)),
               format_bytes(layer_bytes),
               format_bytes(row.sequence_bytes),
               row.parameters ? format_parameters(*row.parameters) : "-",
               format_parameters(row.new_parameters));
    for (const double card : options.cards) {
      fmt::print("{:>12}", row.parameters ? format_count(count_sequences(row, card)) : "-");
    }
    fmt::print("  {}\n", row.settings);
  }
}

// The layers of students whose layers differ.
void print_layers(const ModelShape& shape,
                  const std::vector<MemoryRow>& rows,
                  std::int64_t context) {
  for (const MemoryRow& row : rows) {
    if (row.mixers.empty() || row.settings == describe(row.mixers.front())) {
      continue;
    }
    fmt::print("\n{}\n", row.name);
    for (std::size_t layer = 0; layer < row.mixers.size(); ++layer) {
      const double bytes = layer_cache_bytes(row.mixers[layer], shape.model, context);
      fmt::print("  layer {:<4}{:>10} tokens {:>12}  {}\n",
                 layer,
                 format_tokens(bytes / cached_token_bytes(shape.model)),
                 format_bytes(bytes),
                 describe(row.mixers[layer]));
    }
  }
}

Json row_json(const MemoryRow& row, const ModelShape& shape, const MemoryOptions& options) {
  Json json{{"name", row.name}, {"fits", row.least_budget == 0}};
  if (row.least_budget > 0) {
    json["least_budget"] = row.least_budget;
    return json;
  }
  const double layer_bytes = row.sequence_bytes / static_cast<double>(shape.model.layers);
  json["settings"] = row.settings;
  json["tokens_per_layer"] = layer_bytes / cached_token_bytes(shape.model);
  json["bytes_per_layer"] = layer_bytes;
  json["bytes_per_sequence"] = row.sequence_bytes;
  json["parameters"] = row.parameters ? Json(*row.parameters) : Json(nullptr);
  json["new_parameters"] = row.new_parameters;
  Json cards = Json::array();
  for (const double card : options.cards) {
    cards.push_back(
        {{"card_gib", card},
         {"sequences", row.parameters ? Json(count_sequences(row, card)) : Json(nullptr)}});
  }
  json["cards"] = std::move(cards);
  Json layers = Json::array();
  for (const MixerSettings& mixer : row.mixers) {
    const double bytes = layer_cache_bytes(mixer, shape.model, options.context);
    layers.push_back({{"mixer", describe(mixer)},
                      {"tokens", bytes / cached_token_bytes(shape.model)},
                      {"bytes", bytes}});
  }
  json["layers"] = std::move(layers);
  return json;
}

void run_memory(const MemoryOptions& options) {
  BIFOCAL_REQUIRE(options.mixers.empty() || options.presets.size() == 1,
                  "[memory] --mixers changes the layers of one preset: name it with --preset");
  const ModelShape shape = read_model_shape(options.path);
  const std::vector<MemoryRow> rows = make_rows(shape, options);
  if (options.wants_json) {
    Json json{{"model_type", shape.type},
              {"layers", shape.model.layers},
              {"token_bytes", cached_token_bytes(shape.model)},
              {"budget", options.budget},
              {"context", options.context}};
    json["models"] = Json::array();
    for (const MemoryRow& row : rows) {
      json["models"].push_back(row_json(row, shape, options));
    }
    fmt::print("{}\n", json.dump(2));
    return;
  }
  print_table(shape, rows, options);
  print_layers(shape, rows, options.context);
  if (!shape.native.has_value() && !shape.is_student) {
    fmt::print("\nThe model's own layers are of a kind whose cache is not known here.\n");
  }
  if (!shape.has_dense_mlp) {
    fmt::print("\nThe model mixes experts: its parameters are not counted.\n");
  }
}

}  // namespace

void add_memory_command(CLI::App& app, const CommandContext& context) {
  auto options = std::make_shared<MemoryOptions>();
  CLI::App* command =
      app.add_subcommand("memory", "Cache of a model's students, for any Hugging Face config.json");
  command->add_option("path", options->path, "config.json, or the directory that holds it")
      ->required();
  command->add_option("--preset", options->presets, "Students to show (default: all four)");
  command->add_option("--mixers", options->mixers, "Layers that differ, as student.mixers");
  command->add_option("--budget", options->budget, "Cached tokens per layer")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--context", options->context, "Tokens in a cache that has no bound")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--card-gib", options->cards, "Memory of a card in GiB")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", options->wants_json, "JSON instead of a table");
  command->callback([options, &context] {
    require_one_rank(context, "memory");
    run_memory(*options);
  });
}

}  // namespace bifocal
