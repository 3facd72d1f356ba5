// What a config.json may not ask for.
#include "hf/refusals.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "hf/strict_json.h"

namespace bifocal {

namespace {

// A key that must be absent, null or false.
struct Flag {
  const char* key;
  const char* reason;
};

constexpr Flag kFlags[] = {
    {"use_sliding_window", "the teacher attends within a window; only full attention is supported"},
    {"mlp_bias", "biases in the MLP are not supported"},
    {"use_bias", "biases in the projections are not supported"},
    {"attention_out_bias", "a bias on the attention output is not supported"},
    {"attention_output_bias", "a bias on the attention output is not supported"},
    {"lm_head_bias", "a bias on the head is not supported"},
    {"rope_interleaved", "interleaved rotary pairs are not supported"},
    {"rope_interleave", "interleaved rotary pairs are not supported"},
    {"alibi", "ALiBi positions are not supported"},
    {"parallel_attn", "parallel attention and MLP are not supported"},
    {"use_parallel_residual", "parallel attention and MLP are not supported"},
    {"is_encoder_decoder", "encoder-decoder models are not supported"},
    {"add_cross_attention", "cross attention is not supported"},
    {"attn_output_gate", "gated attention outputs are not supported"},
    {"use_mla", "latent attention is not supported"},
};

// A key that must be absent, null or this number.
struct Neutral {
  const char* key;
  double value;
  const char* reason;
};

constexpr Neutral kNeutral[] = {
    {"partial_rotary_factor", 1.0, "rotary positions on a part of the head are not supported"},
    {"rotary_pct", 1.0, "rotary positions on a part of the head are not supported"},
    {"embedding_multiplier", 1.0, "scaled embeddings are not supported"},
    {"residual_multiplier", 1.0, "scaled residuals are not supported"},
    {"logits_scaling", 1.0, "scaled logits are not supported"},
    {"logit_scale", 1.0, "scaled logits are not supported"},
    {"num_experts", 0.0, "mixtures of experts are not supported"},
    {"num_local_experts", 0.0, "mixtures of experts are not supported"},
    {"n_routed_experts", 0.0, "mixtures of experts are not supported"},
    {"num_experts_per_tok", 0.0, "mixtures of experts are not supported"},
    {"num_nextn_predict_layers", 0.0, "prediction of several tokens is not supported"},
};

// A key that must be absent or null.
constexpr Flag kAbsent[] = {
    {"quantization_config", "quantised weights are not supported: use the unquantised model"},
    {"compression_config", "compressed weights are not supported: use the uncompressed model"},
    {"text_config", "this is a part of a larger model; give the text decoder's own directory"},
    {"final_logit_softcapping", "capped logits are not supported"},
    {"attn_logit_softcapping", "capped attention logits are not supported"},
    {"attention_multiplier", "another scale of the attention logits is not supported"},
    {"query_pre_attn_scalar", "another scale of the attention logits is not supported"},
    {"clip_qkv", "clipped queries, keys and values are not supported"},
    {"no_rope_layers", "layers without rotary positions are not supported"},
    {"no_rope_layer_interval", "layers without rotary positions are not supported"},
    {"attention_chunk_size", "chunked attention is not supported"},
    {"pruned_heads_per_layer", "pruned heads are not supported"},
};

[[noreturn]] void refuse(const JsonFields& config, const std::string& key, const char* reason) {
  fail("[config] {}: {} = {}: {}", config.where(), key, shown(*config.find(key)), reason);
}

void refuse_tables(const JsonFields& config) {
  for (const Flag& flag : kFlags) {
    if (config.is_true(flag.key)) {
      refuse(config, flag.key, flag.reason);
    }
  }
  for (const Neutral& neutral : kNeutral) {
    const std::optional<double> value = config.find_number(neutral.key);
    if (value.has_value() && *value != neutral.value) {
      refuse(config, neutral.key, neutral.reason);
    }
  }
  for (const Flag& absent : kAbsent) {
    if (config.has(absent.key)) {
      refuse(config, absent.key, absent.reason);
    }
  }
}

void refuse_activation(const JsonFields& config) {
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const std::optional<std::string> activation = config.find_string(key);
    if (activation.has_value() && *activation != "silu" && *activation != "swish") {
      refuse(config, key, "only the silu activation is supported");
    }
  }
}

void refuse_biases_and_norms(const JsonFields& config, Family family) {
  if (family == Family::qwen2) {
    return;  // its biases on q, k, v stand in no key, and transformers reads none of these
  }
  for (const char* key : {"attention_bias", "qkv_bias"}) {
    if (config.is_true(key)) {
      refuse(config, key, "biases on the attention projections are supported for qwen2 only");
    }
  }
  if (family == Family::llama) {
    for (const char* key : {"use_qk_norm", "qk_layernorm", "qk_norm"}) {
      if (config.is_true(key)) {
        refuse(config, key, "norms of queries and keys are supported for qwen3 only");
      }
    }
  }
}

void refuse_layer_kinds(const JsonFields& config, Family family, std::int64_t layers) {
  if (const OrderedJson* types = config.find("layer_types"); types != nullptr) {
    BIFOCAL_REQUIRE(types->is_array() && static_cast<std::int64_t>(types->size()) == layers,
                    "[config] {}: layer_types must name each of {} layers",
                    config.where(),
                    layers);
    for (const OrderedJson& type : *types) {
      BIFOCAL_REQUIRE(type == "full_attention",
                      "[config] {}: layer_types holds {}: only full_attention is supported",
                      config.where(),
                      shown(type));
    }
  }
  // The Qwen families slide only where use_sliding_window says so, whatever the window is.
  if (family == Family::llama && config.has("sliding_window") &&
      !config.has("use_sliding_window")) {
    refuse(config, "sliding_window", "sliding-window teachers are not supported");
  }
}

}  // namespace

void refuse_other_mathematics(const JsonFields& config, Family family, std::int64_t layers) {
  refuse_tables(config);
  refuse_activation(config);
  refuse_biases_and_norms(config, family);
  refuse_layer_kinds(config, family, layers);
}

void refuse_other_code(const JsonFields& config, bool is_student) {
  if (const OrderedJson* map = config.find("auto_map"); map != nullptr) {
    const bool is_ours =
        is_student && map->is_object() && std::ranges::all_of(*map, [](const OrderedJson& value) {
          if (!value.is_string()) {
            return false;
          }
          const auto& name = value.get_ref<const std::string&>();
          return name.ends_with("configuration_bifocal.BifocalConfig") ||
                 name.ends_with("modeling_bifocal.BifocalForCausalLM");
        });
    if (!is_ours) {
      refuse(config, "auto_map", "the model brings code of its own, which may compute anything");
    }
  }
  const OrderedJson* architectures = config.find("architectures");
  if (architectures == nullptr) {
    return;
  }
  BIFOCAL_REQUIRE(
      architectures->is_array(), "[config] {}: architectures must be a list", config.where());
  for (const OrderedJson& name : *architectures) {
    const bool known = name == "Qwen3ForCausalLM" || name == "Qwen2ForCausalLM" ||
                       name == "LlamaForCausalLM" || name == "BifocalForCausalLM";
    if (!known) {
      refuse(config, "architectures", "only causal language models of these types are supported");
    }
  }
}

}  // namespace bifocal
