// The shape of any decoder that a Hugging Face config.json describes.
#include "hf/model_shape.h"

#include <initializer_list>

#include <fmt/format.h>

#include "core/error.h"
#include "core/file.h"
#include "hf/hf_config.h"
#include "hf/json_fields.h"
#include "hf/size_limits.h"
#include "hf/strict_json.h"

namespace bifocal {

namespace {

// The value of the first of several names of one size.
std::optional<std::int64_t> find_size(const JsonFields& config,
                                      std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (config.has(name)) {
      return config.integer(name, 1, kMostWidth);
    }
  }
  return std::nullopt;
}

std::int64_t size_of_config(const JsonFields& config, std::initializer_list<const char*> names) {
  const std::optional<std::int64_t> size = find_size(config, names);
  BIFOCAL_REQUIRE(size.has_value(),
                  "[config] {} lacks {}: give the config.json of a decoder",
                  config.where(),
                  *names.begin());
  return *size;
}

// The part that describes the text decoder; the whole where nothing is nested.
const OrderedJson& text_part(const OrderedJson& json) {
  for (const char* key : {"text_config", "llm_config", "language_config"}) {
    const auto found = json.find(key);
    if (found != json.end() && found->is_object()) {
      return *found;
    }
  }
  return json;
}

ModelConfig parse_sizes(const JsonFields& config,
                        const JsonFields& outer,
                        const std::string& type) {
  ModelConfig model;
  model.vocabulary =
      (config.has("vocab_size") ? config : outer).integer("vocab_size", 1, kMostVocabulary);
  model.hidden = size_of_config(config, {"hidden_size", "n_embd", "d_model"});
  model.layers = size_of_config(config, {"num_hidden_layers", "n_layer", "num_layers"});
  BIFOCAL_REQUIRE(model.layers <= kMostLayers,
                  "[config] {}: {} layers are more than {}: check the sizes",
                  config.where(),
                  model.layers,
                  kMostLayers);
  model.heads = size_of_config(config, {"num_attention_heads", "n_head", "num_heads"});
  model.kv_heads = find_size(config, {"num_key_value_heads", "num_kv_heads"}).value_or(model.heads);
  model.intermediate =
      find_size(config, {"intermediate_size", "n_inner", "ffn_dim"}).value_or(4 * model.hidden);
  model.head_dim = find_size(config, {"head_dim"}).value_or(model.hidden / model.heads);
  BIFOCAL_REQUIRE(model.heads % model.kv_heads == 0 && model.head_dim > 0,
                  "[config] {}: {} query heads cannot share {} key-value heads of width {}",
                  config.where(),
                  model.heads,
                  model.kv_heads,
                  model.head_dim);
  BIFOCAL_REQUIRE(model.head_dim <= kMostHeadDim && model.attention_width() <= kMostWidth,
                  "[config] {}: {} heads of width {} are wider than {}: check the sizes",
                  config.where(),
                  model.heads,
                  model.head_dim,
                  kMostWidth);
  model.tied = config.has("tie_word_embeddings") ? config.is_true("tie_word_embeddings")
                                                 : outer.is_true("tie_word_embeddings");
  model.qk_norm =
      type.starts_with("qwen3") || type.starts_with("gemma3") || config.is_true("use_qk_norm");
  model.qkv_bias =
      type.starts_with("qwen2") || config.is_true("attention_bias") || config.is_true("qkv_bias");
  model.mixers.assign(static_cast<std::size_t>(model.layers), MixerSettings{});
  return model;
}

bool has_experts(const JsonFields& config) {
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (config.find_integer(key).value_or(0) > 0) {
      return true;
    }
  }
  return false;
}

std::optional<LayerKind> parse_kind(const OrderedJson& type) {
  if (type == "full_attention" || type == "attention") {
    return LayerKind::full;
  }
  if (type == "sliding_attention") {
    return LayerKind::sliding;
  }
  if (type == "linear_attention") {
    return LayerKind::linear;
  }
  return std::nullopt;
}

// Kinds from layer_types; else linear layers with a full one at every full_attention_interval; else
// one window for all; else full attention.
std::optional<std::vector<LayerKind>> parse_kinds(const JsonFields& config, std::int64_t layers) {
  std::vector<LayerKind> kinds;
  if (const OrderedJson* types = config.find("layer_types"); types != nullptr) {
    for (const OrderedJson& type : *types) {
      const std::optional<LayerKind> kind = parse_kind(type);
      if (!kind.has_value()) {
        return std::nullopt;
      }
      kinds.push_back(*kind);
    }
    BIFOCAL_REQUIRE(static_cast<std::int64_t>(kinds.size()) == layers,
                    "[config] {}: layer_types names {} layers of {}",
                    config.where(),
                    kinds.size(),
                    layers);
    return kinds;
  }
  kinds.assign(static_cast<std::size_t>(layers), LayerKind::full);
  if (config.has("full_attention_interval") && config.has("linear_num_value_heads")) {
    const std::int64_t interval = config.integer("full_attention_interval", 1);
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      if ((layer + 1) % interval != 0) {
        kinds[static_cast<std::size_t>(layer)] = LayerKind::linear;
      }
    }
  } else if (config.has("sliding_window") &&
             config.find_bool("use_sliding_window").value_or(true)) {
    kinds.assign(kinds.size(), LayerKind::sliding);
  }
  return kinds;
}

std::optional<NativeLayout> parse_native(const JsonFields& config, std::int64_t layers) {
  std::optional<std::vector<LayerKind>> kinds = parse_kinds(config, layers);
  if (!kinds.has_value()) {
    return std::nullopt;
  }
  NativeLayout layout;
  layout.layers = std::move(*kinds);
  for (const LayerKind kind : layout.layers) {
    if (kind == LayerKind::sliding && layout.window == 0) {
      layout.window = config.integer("sliding_window", 1);
    }
    if (kind == LayerKind::linear && layout.linear.value_heads == 0) {
      if (!config.has("linear_num_value_heads")) {
        return std::nullopt;
      }
      layout.linear = {.key_heads = config.integer("linear_num_key_heads", 1),
                       .value_heads = config.integer("linear_num_value_heads", 1),
                       .key_dim = config.integer("linear_key_head_dim", 1),
                       .value_dim = config.integer("linear_value_head_dim", 1),
                       .conv_kernel = config.integer("linear_conv_kernel_dim", 1)};
    }
  }
  return layout;
}

}  // namespace

ModelShape parse_model_shape(const std::string& text, const std::string& where) {
  const OrderedJson json = parse_json_object(text, where);
  const JsonFields outer(json, where);
  const JsonFields config(text_part(json), where);
  ModelShape shape;
  shape.type = config.find_string("model_type")
                   .value_or(outer.find_string("model_type").value_or("unknown"));
  if (shape.type == "bifocal" || config.has("mixer")) {
    shape.model = parse_hf_config(text, where);
    shape.is_student = true;
    return shape;
  }
  BIFOCAL_REQUIRE(!config.has("kv_lora_rank"),
                  "[config] {}: latent attention (kv_lora_rank) caches no keys and values that a "
                  "mixer could replace",
                  where);
  shape.model = parse_sizes(config, outer, shape.type);
  shape.has_dense_mlp = !has_experts(config);
  shape.native = parse_native(config, shape.model.layers);
  return shape;
}

ModelShape read_model_shape(const std::filesystem::path& path) {
  const std::filesystem::path file =
      std::filesystem::is_directory(path) ? path / "config.json" : path;
  return parse_model_shape(
      read_small_file(file, kMostConfigBytes, fmt::format("[config] {}", file.string())),
      file.string());
}

}  // namespace bifocal
