// Writing config.json of students and of base models.
#include <algorithm>
#include <string_view>

#include "core/error.h"
#include "hf/hf_config.h"
#include "hf/json_fields.h"

namespace bifocal {

namespace {

const char* architecture_of(Family family) {
  switch (family) {
    case Family::qwen3:
      return "Qwen3ForCausalLM";
    case Family::qwen2:
      return "Qwen2ForCausalLM";
    case Family::llama:
      return "LlamaForCausalLM";
  }
  return "";
}

// The keys of a model that was made here and has no config.json to start from.
OrderedJson fresh_json(const ModelConfig& model) {
  OrderedJson json;
  json["model_type"] = name_of(model.family);
  json["vocab_size"] = model.vocabulary;
  json["hidden_size"] = model.hidden;
  json["intermediate_size"] = model.intermediate;
  json["num_hidden_layers"] = model.layers;
  json["num_attention_heads"] = model.heads;
  json["num_key_value_heads"] = model.kv_heads;
  json["head_dim"] = model.head_dim;
  json["hidden_act"] = "silu";
  json["rms_norm_eps"] = model.norm_eps;
  json["rope_theta"] = model.rope_theta;
  if (model.rope_scaling.factor != 1.0) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", model.rope_scaling.factor},
                            {"low_freq_factor", model.rope_scaling.low_freq_factor},
                            {"high_freq_factor", model.rope_scaling.high_freq_factor},
                            {"original_max_position_embeddings",
                             static_cast<std::int64_t>(model.rope_scaling.original_max_position)}};
  }
  json["max_position_embeddings"] = model.max_position;
  json["tie_word_embeddings"] = model.tied;
  return json;
}

OrderedJson mixer_json(const MixerSettings& mixer) {
  OrderedJson json;
  if (mixer.is_full()) {
    json["window"] = "full";
  } else {
    json["window"] = mixer.window;
  }
  json["sink"] = name_of(mixer.sink);
  json["sink_tokens"] = mixer.sink_tokens;
  json["states"] = name_of(mixer.states);
  json["mix"] = name_of(mixer.mix);
  return json;
}

}  // namespace

bool is_student(const ModelConfig& model) {
  return std::ranges::any_of(model.mixers,
                             [](const MixerSettings& mixer) { return !mixer.is_full(); });
}

std::string write_hf_config(const ModelConfig& model, DType dtype) {
  OrderedJson json = model.source_json.empty()
                         ? fresh_json(model)
                         : parse_json_object(model.source_json, "the base model's config");
  const bool is_base = !is_student(model);
  json["architectures"] = {is_base ? architecture_of(model.family) : "BifocalForCausalLM"};
  if (!is_base) {
    json["model_type"] = "bifocal";
    json["auto_map"] = {{"AutoConfig", "configuration_bifocal.BifocalConfig"},
                        {"AutoModelForCausalLM", "modeling_bifocal.BifocalForCausalLM"}};
    json["base_model_type"] = name_of(model.family);
    OrderedJson mixers = OrderedJson::array();
    for (const MixerSettings& mixer : model.mixers) {
      mixers.push_back(mixer_json(mixer));
    }
    json["mixers"] = std::move(mixers);
  }
  // transformers 5 renamed torch_dtype to dtype; a reader of either finds what it looks for.
  const char* key = json.contains("dtype") ? "dtype" : "torch_dtype";
  json.erase(key == std::string_view("dtype") ? "torch_dtype" : "dtype");
  json[key] = name_of(dtype);
  return json.dump(2) + "\n";
}

}  // namespace bifocal
