// Reading config.json of base models and students.
#include "hf/hf_config.h"

#include <fmt/format.h>

#include "core/error.h"
#include "hf/json_fields.h"
#include "hf/refusals.h"
#include "hf/size_limits.h"
#include "hf/strict_json.h"

namespace bifocal {

namespace {

struct Rope {
  double theta = 0.0;
  RopeScaling scaling;
};

Family parse_family(const std::string& type, const std::string& where) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    if (type == name_of(family)) {
      return family;
    }
  }
  fail("[config] {}: model type \"{}\" is not supported: use qwen3, qwen2, llama or bifocal",
       where,
       type);
}

// One object of rope settings: rope_scaling, or rope_parameters of transformers 5.
RopeScaling parse_rope_object(const JsonFields& rope) {
  std::string type = "default";
  for (const char* key : {"type", "rope_type"}) {
    type = rope.find_string(key).value_or(type);
  }
  const double partial = rope.find_number("partial_rotary_factor").value_or(1.0);
  BIFOCAL_REQUIRE(partial == 1.0,
                  "[config] {}: partial_rotary_factor = {}: rotary positions on a part of the head "
                  "are not supported",
                  rope.where(),
                  partial);
  BIFOCAL_REQUIRE(
      !rope.has("full_attention") && !rope.has("sliding_attention") && !rope.has("mrope_section"),
      "[config] {}: rope settings that differ between layers or sections are not "
      "supported",
      rope.where());
  if (type == "default") {
    const double factor = rope.find_number("factor").value_or(1.0);
    BIFOCAL_REQUIRE(factor == 1.0,
                    "[config] {}: factor = {} without a rope_type is not supported: use llama3 or "
                    "no scaling",
                    rope.where(),
                    factor);
    return {};
  }
  BIFOCAL_REQUIRE(type == "llama3",
                  "[config] {}: rope scaling \"{}\" is not supported: use llama3 or no scaling",
                  rope.where(),
                  type);
  RopeScaling scaling;
  scaling.factor = rope.positive("factor");
  scaling.low_freq_factor = rope.positive("low_freq_factor");
  scaling.high_freq_factor = rope.positive("high_freq_factor");
  scaling.original_max_position = rope.positive("original_max_position_embeddings");
  BIFOCAL_REQUIRE(scaling.factor >= 1.0 && scaling.high_freq_factor > scaling.low_freq_factor,
                  "[config] {}: llama3 scaling needs factor >= 1 and high_freq_factor above "
                  "low_freq_factor",
                  rope.where());
  return scaling;
}

// theta stands as rope_theta (older) or inside rope_parameters; where both speak they must agree.
Rope parse_rope(const JsonFields& config, Family family) {
  std::optional<double> theta;
  if (config.has("rope_theta")) {
    theta = config.positive("rope_theta");
  }
  std::optional<RopeScaling> scaling;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const OrderedJson* object = config.find(key);
    if (object == nullptr) {
      continue;
    }
    const JsonFields fields(*object, fmt::format("{}: {}", config.where(), key));
    if (fields.has("rope_theta")) {
      const double inner = fields.positive("rope_theta");
      BIFOCAL_REQUIRE(!theta.has_value() || *theta == inner,
                      "[config] {}: rope_theta is {} and {}: make them agree",
                      config.where(),
                      *theta,
                      inner);
      theta = inner;
    }
    const RopeScaling parsed = parse_rope_object(fields);
    BIFOCAL_REQUIRE(!scaling.has_value() || *scaling == parsed,
                    "[config] {}: rope_scaling and rope_parameters disagree",
                    config.where());
    scaling = parsed;
  }
  // Llama's first releases came without the key; every Qwen config states it.
  BIFOCAL_REQUIRE(theta.has_value() || family == Family::llama,
                  "[config] {} has neither rope_theta nor rope_parameters.rope_theta: add it",
                  config.where());
  // transformers lets this key outvote the one inside the rope settings.
  if (scaling.has_value() && scaling->factor != 1.0 &&
      config.has("original_max_position_embeddings")) {
    const double outer = config.positive("original_max_position_embeddings");
    BIFOCAL_REQUIRE(outer == scaling->original_max_position,
                    "[config] {}: original_max_position_embeddings is {} and {}: make them agree",
                    config.where(),
                    outer,
                    scaling->original_max_position);
  }
  return {theta.value_or(10000.0), scaling.value_or(RopeScaling{})};
}

void parse_shape(const JsonFields& config, ModelConfig& model) {
  model.vocabulary = config.integer("vocab_size", 1, kMostVocabulary);
  model.hidden = config.integer("hidden_size", 1, kMostWidth);
  model.intermediate = config.integer("intermediate_size", 1, kMostWidth);
  model.layers = config.integer("num_hidden_layers", 1, kMostLayers);
  model.heads = config.integer("num_attention_heads", 1, kMostWidth);
  model.kv_heads = config.has("num_key_value_heads")
                       ? config.integer("num_key_value_heads", 1, kMostWidth)
                       : model.heads;
  BIFOCAL_REQUIRE(model.heads % model.kv_heads == 0,
                  "[config] {}: {} query heads cannot share {} key-value heads evenly",
                  config.where(),
                  model.heads,
                  model.kv_heads);
  if (config.has("head_dim")) {
    model.head_dim = config.integer("head_dim", 1, kMostHeadDim);
  } else {
    BIFOCAL_REQUIRE(model.hidden % model.heads == 0,
                    "[config] {}: no head_dim, and hidden_size {} is no multiple of {} heads",
                    config.where(),
                    model.hidden,
                    model.heads);
    model.head_dim = model.hidden / model.heads;
  }
  BIFOCAL_REQUIRE(model.head_dim % 2 == 0,
                  "[config] {}: head_dim {} is odd: rotary positions rotate halves",
                  config.where(),
                  model.head_dim);
  BIFOCAL_REQUIRE(model.attention_width() <= kMostWidth,
                  "[config] {}: {} heads of {} features are more than {}: check the sizes",
                  config.where(),
                  model.heads,
                  model.head_dim,
                  kMostWidth);
  model.norm_eps = config.has("rms_norm_eps") ? config.positive("rms_norm_eps") : 1e-6;
  model.tied = config.is_true("tie_word_embeddings");
  model.max_position = config.integer("max_position_embeddings", 1);
}

MixerSettings parse_mixer(const OrderedJson& json, const std::string& where) {
  const JsonFields fields(json, where);
  for (const auto& [key, value] : json.items()) {
    const bool known =
        key == "window" || key == "sink" || key == "sink_tokens" || key == "states" || key == "mix";
    BIFOCAL_REQUIRE(known, "[config] {}: no mixer setting \"{}\" is known", where, key);
  }
  MixerSettings mixer;
  const OrderedJson* window = fields.find("window");
  BIFOCAL_REQUIRE(window != nullptr, "[config] {} lacks window", where);
  if (*window != "full") {
    mixer.window = fields.integer("window", 0);
  }
  mixer.sink = parse_sink(fields.string("sink"));
  mixer.sink_tokens = fields.has("sink_tokens") ? fields.integer("sink_tokens", 0) : 0;
  mixer.states = parse_states(fields.string("states"));
  mixer.mix = parse_mix(fields.find_string("mix").value_or("gate"));
  return mixer;
}

// One object per layer, as we write it.
std::vector<MixerSettings> parse_mixers(const JsonFields& config, std::int64_t layers) {
  const OrderedJson* list = config.find("mixers");
  BIFOCAL_REQUIRE(
      list != nullptr && list->is_array() && static_cast<std::int64_t>(list->size()) == layers,
      "[config] {}: mixers must be a list of {}, one per layer",
      config.where(),
      layers);
  std::vector<MixerSettings> mixers;
  for (const OrderedJson& json : *list) {
    mixers.push_back(
        parse_mixer(json, fmt::format("{}: mixers[{}]", config.where(), mixers.size())));
  }
  return mixers;
}

// The older form: one preset's name with its window.
MixerSettings parse_alias(const JsonFields& config) {
  const std::string name = config.string("mixer");
  MixerSettings mixer;
  mixer.window = config.integer("window", 1);
  mixer.sink_tokens = config.has("sink_tokens") ? config.integer("sink_tokens", 0) : 0;
  mixer.sink = Sink::learned;
  if (name == "swa_sink_tokens") {
    mixer.sink = Sink::tokens;
  } else if (name == "bifocal") {
    mixer.states = States::kv;
  } else if (name == "bifocal_query") {
    mixer.states = States::query;
  } else {
    BIFOCAL_REQUIRE(name == "swa_learned_sink",
                    "[config] {}: mixer \"{}\" is not known: use swa_learned_sink, "
                    "swa_sink_tokens, bifocal or bifocal_query",
                    config.where(),
                    name);
  }
  return mixer;
}

// The base model's keys, without what makes it a student.
std::string base_json(OrderedJson json, Family family) {
  for (const char* key :
       {"mixers", "base_model_type", "auto_map", "mixer", "window", "sink_tokens"}) {
    json.erase(key);
  }
  json["model_type"] = name_of(family);
  return json.dump();
}

}  // namespace

ModelConfig parse_hf_config(const std::string& json, const std::string& where) {
  const OrderedJson parsed = parse_json_object(json, where);
  const JsonFields config(parsed, where);
  const std::string type = config.string("model_type");
  const bool is_student = type == "bifocal";
  const bool is_alias = !is_student && config.has("mixer");

  ModelConfig model;
  model.family = parse_family(is_student ? config.string("base_model_type") : type, where);
  model.qk_norm = model.family == Family::qwen3;
  model.qkv_bias = model.family == Family::qwen2;
  parse_shape(config, model);
  const Rope rope = parse_rope(config, model.family);
  model.rope_theta = rope.theta;
  model.rope_scaling = rope.scaling;
  refuse_other_mathematics(config, model.family, model.layers);
  refuse_other_code(config, is_student);

  if (is_student) {
    model.mixers = parse_mixers(config, model.layers);
  } else {
    BIFOCAL_REQUIRE(!config.has("mixers"),
                    "[config] {}: mixers belong to model_type bifocal, got {}",
                    where,
                    type);
    model.mixers.assign(static_cast<std::size_t>(model.layers),
                        is_alias ? parse_alias(config) : MixerSettings{});
  }
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    check_mixer(model.mixers[static_cast<std::size_t>(layer)], model, layer);
  }
  model.source_json = is_student || is_alias ? base_json(parsed, model.family) : parsed.dump();
  return model;
}

ModelConfig read_hf_config(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "config.json";
  BIFOCAL_REQUIRE(std::filesystem::is_regular_file(file),
                  "[config] no {}: give a Hugging Face directory",
                  file.string());
  return parse_hf_config(
      read_small_file(file, kMostConfigBytes, fmt::format("[config] {}", file.string())),
      file.string());
}

}  // namespace bifocal
