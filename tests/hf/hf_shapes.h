// config.json texts of the shapes that the tests know.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace bifocal::testing {

// Qwen3-4B-Instruct-2507, in the form of transformers 4.
inline nlohmann::ordered_json qwen3_4b() {
  return nlohmann::ordered_json::parse(R"({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
    "max_position_embeddings": 262144, "max_window_layers": 36, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 5000000, "sliding_window": null, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936})");
}

// SmolLM2-135M-Instruct: Llama without head_dim.
inline nlohmann::ordered_json smollm2_135m() {
  return nlohmann::ordered_json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
    "intermediate_size": 1536, "max_position_embeddings": 8192, "mlp_bias": false,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
    "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "vocab_size": 49152})");
}

// A tiny untied Qwen2 in the form of transformers 5.
inline nlohmann::ordered_json tiny_qwen2() {
  return nlohmann::ordered_json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "float32",
    "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 40,
    "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 64,
    "max_window_layers": 28, "num_attention_heads": 6, "num_hidden_layers": 2,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false,
    "vocab_size": 50})");
}

}  // namespace bifocal::testing
