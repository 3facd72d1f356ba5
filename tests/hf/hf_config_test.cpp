// config.json: what is read, what is refused, what is written.
#include "hf/hf_config.h"

#include <fstream>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_shapes.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

using Json = nlohmann::ordered_json;

ModelConfig parse(const Json& json) {
  return parse_hf_config(json.dump(), "test");
}

Json with(Json json, const char* key, const Json& value) {
  json[key] = value;
  return json;
}

Json without(Json json, const char* key) {
  json.erase(key);
  return json;
}

std::string refusal(const Json& json) {
  try {
    parse(json);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(HfConfig, ReadsQwen3) {
  const ModelConfig model = parse(testing::qwen3_4b());
  EXPECT_EQ(model.family, Family::qwen3);
  EXPECT_EQ(model.vocabulary, 151936);
  EXPECT_EQ(model.hidden, 2560);
  EXPECT_EQ(model.intermediate, 9728);
  EXPECT_EQ(model.layers, 36);
  EXPECT_EQ(model.heads, 32);
  EXPECT_EQ(model.kv_heads, 8);
  EXPECT_EQ(model.head_dim, 128);
  EXPECT_EQ(model.norm_eps, 1e-6);
  EXPECT_EQ(model.rope_theta, 5e6);
  EXPECT_EQ(model.rope_scaling, RopeScaling{});
  EXPECT_TRUE(model.qk_norm);
  EXPECT_FALSE(model.qkv_bias);
  EXPECT_TRUE(model.tied);
  EXPECT_EQ(model.max_position, 262144);
  EXPECT_EQ(model.mixers, std::vector<MixerSettings>(36));
}

TEST(HfConfig, ReadsLlamaWithoutHeadDim) {
  const ModelConfig model = parse(testing::smollm2_135m());
  EXPECT_EQ(model.family, Family::llama);
  EXPECT_EQ(model.head_dim, 64);
  EXPECT_EQ(model.norm_eps, 1e-5);
  EXPECT_EQ(model.rope_theta, 1e5);
  EXPECT_FALSE(model.qk_norm);
}

TEST(HfConfig, ReadsQwen2InTheNewerForm) {
  const ModelConfig model = parse(testing::tiny_qwen2());
  EXPECT_EQ(model.family, Family::qwen2);
  EXPECT_EQ(model.head_dim, 4);
  EXPECT_EQ(model.rope_theta, 1e6);
  EXPECT_TRUE(model.qkv_bias);
  EXPECT_FALSE(model.qk_norm);
  EXPECT_FALSE(model.tied);
}

TEST(HfConfig, ReadsLlama3RopeInBothForms) {
  const RopeScaling wanted{32.0, 1.0, 4.0, 8192.0};
  Json scaling = {{"factor", 32.0},
                  {"high_freq_factor", 4.0},
                  {"low_freq_factor", 1.0},
                  {"original_max_position_embeddings", 8192},
                  {"rope_type", "llama3"}};
  const ModelConfig older = parse(with(testing::smollm2_135m(), "rope_scaling", scaling));
  EXPECT_EQ(older.rope_scaling, wanted);
  EXPECT_EQ(older.rope_theta, 1e5);
  scaling["rope_theta"] = 500000.0;
  const ModelConfig newer =
      parse(with(without(testing::smollm2_135m(), "rope_theta"), "rope_parameters", scaling));
  EXPECT_EQ(newer.rope_scaling, wanted);
  EXPECT_EQ(newer.rope_theta, 5e5);
  scaling.erase("low_freq_factor");
  EXPECT_NE(refusal(with(testing::smollm2_135m(), "rope_scaling", scaling)), "");
}

TEST(HfConfig, AcceptsWhatDoesNotChangeTheMathematics) {
  const Json base = testing::qwen3_4b();
  for (const auto& [key, value] : std::initializer_list<std::pair<const char*, Json>>{
           {"sliding_window", 4096},
           {"rope_scaling", {{"rope_type", "default"}}},
           {"rope_scaling", {{"type", "default"}}},
           {"num_experts", 0},
           {"quantization_config", nullptr},
           {"unknown_key", "anything"},
           {"hidden_act", "swish"},
           {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5000000.0}}}}) {
    EXPECT_EQ(refusal(with(base, key, value)), "") << key;
  }
  EXPECT_EQ(refusal(without(base, "head_dim")), "");
  EXPECT_EQ(refusal(without(base, "sliding_window")), "");
}

// A change of a good config, and a part of the message that it must get.
struct Refused {
  const char* key;
  Json value;
  const char* reason;
};

void expect_refused(const Json& base, const std::vector<Refused>& changes) {
  for (const Refused& change : changes) {
    const std::string message = refusal(with(base, change.key, change.value));
    EXPECT_NE(message.find(change.reason), std::string::npos)
        << change.key << " = " << change.value.dump() << " got: " << message;
  }
}

TEST(HfConfig, RefusesOtherModels) {
  expect_refused(
      testing::qwen3_4b(),
      {{"model_type", "qwen3_moe", "model type \"qwen3_moe\" is not supported"},
       {"model_type", "mistral", "model type \"mistral\" is not supported"},
       {"num_experts", 64, "num_experts = 64: mixtures of experts"},
       {"num_local_experts", 8, "mixtures of experts"},
       {"n_routed_experts", 8, "mixtures of experts"},
       {"num_nextn_predict_layers", 1, "prediction of several tokens"},
       {"quantization_config", {{"quant_method", "fp8"}}, "quantised weights"},
       {"compression_config", {{"format", "x"}}, "compressed weights"},
       {"text_config", Json::object(), "part of a larger model"},
       {"is_encoder_decoder", true, "encoder-decoder"},
       {"add_cross_attention", true, "cross attention"},
       {"pruned_heads_per_layer", Json::array(), "pruned heads"},
       {"architectures", {"Qwen3ForSequenceClassification"}, "only causal language models"},
       {"architectures", "Qwen3ForCausalLM", "architectures must be a list"},
       {"auto_map", {{"AutoModelForCausalLM", "modeling_other.Other"}}, "code of its own"},
       {"auto_map",
        {{"AutoModelForCausalLM", "modeling_bifocal.BifocalForCausalLM"}},
        "code of its own"},  // ours belongs to students
       {"mixers", Json::array(), "mixers belong to model_type bifocal"}});
}

TEST(HfConfig, RefusesOtherAttentionAndActivations) {
  expect_refused(
      testing::qwen3_4b(),
      {{"use_sliding_window", true, "use_sliding_window = true: the teacher attends"},
       {"layer_types",
        Json(std::vector<std::string>(36, "sliding_attention")),
        "sliding_attention"},
       {"layer_types", Json(std::vector<std::string>(35, "full_attention")), "each of 36 layers"},
       {"attention_chunk_size", 64, "chunked attention"},
       {"attention_bias", true, "biases on the attention projections are supported for qwen2 only"},
       {"qkv_bias", true, "supported for qwen2 only"},
       {"attention_output_bias", true, "a bias on the attention output"},
       {"attention_out_bias", true, "a bias on the attention output"},
       {"mlp_bias", true, "mlp_bias = true: biases in the MLP"},
       {"use_bias", true, "biases in the projections"},
       {"lm_head_bias", true, "a bias on the head"},
       {"hidden_act", "gelu", "hidden_act = \"gelu\": only the silu activation"},
       {"hidden_activation", "gelu_pytorch_tanh", "only the silu activation"},
       {"attn_output_gate", true, "gated attention outputs"},
       {"use_mla", true, "latent attention"},
       {"alibi", true, "ALiBi"},
       {"parallel_attn", true, "parallel attention"},
       {"use_parallel_residual", true, "parallel attention"},
       {"clip_qkv", 8.0, "clipped queries"},
       {"final_logit_softcapping", 30.0, "capped logits"},
       {"attn_logit_softcapping", 50.0, "capped attention logits"},
       {"query_pre_attn_scalar", 256, "another scale"},
       {"attention_multiplier", 0.5, "another scale"},
       {"embedding_multiplier", 12.0, "scaled embeddings"},
       {"residual_multiplier", 0.2, "scaled residuals"},
       {"logits_scaling", 8.0, "scaled logits"},
       {"logit_scale", 0.06, "scaled logits"}});
  expect_refused(testing::smollm2_135m(),
                 {{"sliding_window", 4096, "sliding-window teachers"},
                  {"attention_bias", true, "supported for qwen2 only"},
                  {"use_qk_norm", true, "supported for qwen3 only"},
                  {"qk_layernorm", true, "supported for qwen3 only"}});
}

TEST(HfConfig, RefusesOtherRotaryPositions) {
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const auto changed = [&](const char* key, const Json& value) { return with(llama3, key, value); };
  expect_refused(
      testing::qwen3_4b(),
      {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}, "rope scaling \"yarn\""},
       {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "rope scaling \"linear\""},
       {"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}, "rope scaling \"dynamic\""},
       {"rope_scaling", {{"rope_type", "longrope"}}, "rope scaling \"longrope\""},
       {"rope_scaling", {{"factor", 2.0}}, "factor = 2 without a rope_type"},
       {"rope_scaling", "yarn", "wanted a JSON object"},
       {"rope_scaling", {{"mrope_section", {16, 24, 24}}}, "differ between layers or sections"},
       {"rope_scaling", {{"rope_type", 3}}, "rope_type must be a string"},
       {"rope_parameters", {{"full_attention", Json::object()}}, "differ between layers"},
       {"rope_parameters", {{"rope_theta", 1e6}, {"rope_type", "default"}}, "make them agree"},
       {"rope_parameters", {{"rope_theta", 5e6}, {"partial_rotary_factor", 0.5}}, "part of the"},
       {"partial_rotary_factor", 0.25, "part of the head"},
       {"rotary_pct", 0.25, "part of the head"},
       {"rope_interleaved", true, "interleaved"},
       {"no_rope_layers", {1, 0}, "layers without rotary positions"},
       {"rope_theta", -1.0, "rope_theta must be above 0"},
       {"rope_theta", "large", "rope_theta must be a number"},
       {"rope_scaling", changed("factor", 0.5), "factor >= 1"},
       {"rope_scaling", changed("high_freq_factor", 0.5), "high_freq_factor above"},
       {"rope_scaling", without(llama3, "factor"), "lacks factor"},
       {"rope_scaling",
        without(llama3, "original_max_position_embeddings"),
        "lacks original_max"}});
  // What outvotes the scaling's own value elsewhere must agree with it.
  const Json scaled = with(testing::qwen3_4b(), "rope_scaling", llama3);
  EXPECT_EQ(refusal(with(scaled, "original_max_position_embeddings", 8192)), "");
  expect_refused(scaled, {{"original_max_position_embeddings", 4096, "4096 and 8192"}});
}

TEST(HfConfig, RefusesSizesThatCannotBe) {
  expect_refused(
      testing::qwen3_4b(),
      {{"head_dim", 127, "head_dim 127 is odd"},
       {"head_dim", 0, "head_dim must lie between 1 and"},
       {"num_key_value_heads", 5, "32 query heads cannot share 5 key-value heads"},
       {"num_key_value_heads", 64, "cannot share 64"},
       {"num_hidden_layers", 0, "num_hidden_layers must lie between 1 and"},
       {"num_hidden_layers", 1000000000, "num_hidden_layers must lie between 1 and 16384"},
       {"hidden_size", 2560.5, "hidden_size must be a whole number, got 2560.5"},
       {"hidden_size", -2560, "hidden_size must lie between 1 and"},
       {"hidden_size", 1e300, "hidden_size must be a whole number"},
       {"hidden_size", 9223372036854775807LL, "hidden_size must lie between 1 and"},
       {"hidden_size", 18446744073709551615ULL, "hidden_size must be a whole number"},
       {"num_attention_heads", 1 << 20, "1048576 heads of 128 features are more than"},
       {"intermediate_size", 1LL << 40, "intermediate_size must lie between"},
       {"vocab_size", "many", "vocab_size must be a whole number, got \"many\""},
       {"vocab_size", Json::array(), "vocab_size must be a whole number"},
       {"vocab_size", 1LL << 40, "vocab_size must lie between"},
       {"rms_norm_eps", 0.0, "rms_norm_eps must be above 0"},
       {"max_position_embeddings", 0, "max_position_embeddings must lie between"},
       {"tie_word_embeddings", "yes", "tie_word_embeddings must be true or false"}});
  const Json llama = testing::smollm2_135m();
  EXPECT_NE(refusal(with(llama, "hidden_size", 577)).find("577 is no multiple of 9 heads"),
            std::string::npos);
  for (const char* key : {"model_type",
                          "vocab_size",
                          "hidden_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "intermediate_size",
                          "rope_theta",
                          "max_position_embeddings"}) {
    const std::string message = refusal(without(testing::qwen3_4b(), key));
    EXPECT_NE(message.find(key), std::string::npos) << key << " got: " << message;
  }
}

TEST(HfConfig, RefusesTextThatIsNoConfig) {
  const auto message = [](const std::string& text) {
    try {
      parse_hf_config(text, "test");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string good = testing::qwen3_4b().dump();
  const std::string deep(100000, '[');
  const std::pair<std::string, const char*> texts[] = {
      {"", "is not JSON"},
      {"{", "is not JSON"},
      {"[]", "wanted a JSON object"},
      {"7", "wanted a JSON object"},
      {"null", "wanted a JSON object"},
      {"\xff\xfe", "is not JSON"},
      {"{\"a\": \"\xff\"}", "is not JSON"},
      {"{\"a\": NaN}", "is not JSON"},
      {"{\"rope_theta\": 1e999}", "is not JSON"},
      {good + "x", "is not JSON"},
      {good + std::string("\0", 1) + "x", "NUL byte"},
      {"{\"vocab_size\": 1, \"vocab_size\": 2}", "names \"vocab_size\" twice"},
      {"{\"a\": " + deep, "more than 64 deep"},
      {"{\"a\": " + deep + std::string(deep.size(), ']') + "}", "more than 64 deep"},
      {"{\"" + std::string(5000, 'a') + "\": 1}", "over the limit"}};
  for (const auto& [text, reason] : texts) {
    EXPECT_NE(message(text).find(reason), std::string::npos)
        << text.substr(0, 60) << " got: " << message(text).substr(0, 300);
  }
  // A long value is cut in the message.
  Json json = testing::qwen3_4b();
  json["vocab_size"] = std::string(1000000, 'x');
  EXPECT_LT(refusal(json).size(), 500U);
}

TEST(HfConfig, RefusesFilesThatAreNoConfig) {
  const test::TemporaryDirectory directory;
  const auto message = [&] {
    try {
      read_hf_config(directory.path());
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message().find("give a Hugging Face directory"), std::string::npos);
  ASSERT_EQ(::mkfifo(directory.path("config.json").c_str(), 0600), 0);
  EXPECT_NE(message().find("give a Hugging Face directory"), std::string::npos);
  std::filesystem::remove(directory.path("config.json"));
  std::ofstream(directory.path("config.json")) << testing::qwen3_4b().dump();
  EXPECT_EQ(message(), "");
  std::filesystem::resize_file(directory.path("config.json"), 1U << 30U);  // sparse
  EXPECT_NE(message().find("1073741824 bytes"), std::string::npos);
}

TEST(HfConfig, ReadsTheMapOfItsOwnExports) {
  ModelConfig model = parse(testing::tiny_qwen2());
  model.mixers = make_mixers("bifocal", 16, {}, model);
  Json json = Json::parse(write_hf_config(model));
  EXPECT_EQ(json["auto_map"]["AutoConfig"], "configuration_bifocal.BifocalConfig");
  EXPECT_EQ(json["auto_map"]["AutoModelForCausalLM"], "modeling_bifocal.BifocalForCausalLM");
  const ModelConfig read = parse(json);
  EXPECT_EQ(read.mixers, model.mixers);
  EXPECT_FALSE(Json::parse(read.source_json).contains("auto_map"));
  // As transformers saves what it loaded from a hub.
  json["auto_map"]["AutoConfig"] = "someone/model--configuration_bifocal.BifocalConfig";
  EXPECT_EQ(parse(json).mixers, model.mixers);
  json["auto_map"]["AutoModelForCausalLM"] = "modeling_other.Other";
  EXPECT_NE(refusal(json).find("code of its own"), std::string::npos);
  // A model of full attention is a base model, which needs none.
  EXPECT_FALSE(Json::parse(write_hf_config(parse(testing::tiny_qwen2()))).contains("auto_map"));
}

TEST(HfConfig, StudentSurvivesWritingAndReading) {
  ModelConfig model = parse(testing::qwen3_4b());
  model.mixers = make_mixers(
      "bifocal", 576, {"0:window=full", "1:window=0,states=query", "2:sink=tokens"}, model);
  const std::string text = write_hf_config(model, DType::bf16);
  const Json json = Json::parse(text);
  EXPECT_EQ(json["model_type"], "bifocal");
  EXPECT_EQ(json["base_model_type"], "qwen3");
  EXPECT_EQ(json["architectures"], Json({"BifocalForCausalLM"}));
  EXPECT_EQ(json["eos_token_id"], 151645);
  EXPECT_EQ(json["torch_dtype"], "bfloat16");
  EXPECT_EQ(json["mixers"][0]["window"], "full");
  EXPECT_EQ(json["mixers"][3],
            Json({{"window", 448},
                  {"sink", "learned"},
                  {"sink_tokens", 0},
                  {"states", "kv"},
                  {"mix", "gate"}}));
  const ModelConfig again = parse_hf_config(text, "test");
  EXPECT_EQ(again.mixers, model.mixers);
  EXPECT_EQ(again.family, model.family);
  EXPECT_EQ(again.rope_theta, model.rope_theta);
  EXPECT_EQ(write_hf_config(again, DType::bf16), text);
}

TEST(HfConfig, ModelMadeHereSurvivesWritingAndReading) {
  ModelConfig model = parse(testing::smollm2_135m());
  model.rope_scaling = {8.0, 1.0, 4.0, 8192.0};
  model.source_json.clear();
  const ModelConfig base = parse_hf_config(write_hf_config(model), "test");
  EXPECT_EQ(base.rope_scaling, model.rope_scaling);
  EXPECT_EQ(base.head_dim, 64);
  EXPECT_EQ(base.tied, true);
  EXPECT_EQ(Json::parse(write_hf_config(model))["model_type"], "llama");
  model.mixers = make_mixers("swa_sink_tokens", 100, {}, model);
  EXPECT_EQ(parse_hf_config(write_hf_config(model), "test").mixers, model.mixers);
}

TEST(HfConfig, WritesTheTypeUnderTheKeyThatTheBaseUses) {
  const Json newer = Json::parse(write_hf_config(parse(testing::tiny_qwen2()), DType::bf16));
  EXPECT_EQ(newer["dtype"], "bfloat16");
  EXPECT_FALSE(newer.contains("torch_dtype"));
}

TEST(HfConfig, ReadsTheOlderFormOfAStudent) {
  Json json = with(with(testing::qwen3_4b(), "mixer", "bifocal"), "window", 112);
  json["sink_tokens"] = 0;
  const ModelConfig model = parse(json);
  EXPECT_EQ(model.mixers,
            std::vector<MixerSettings>(36, {112, Sink::learned, 0, States::kv, Mix::gate}));
  EXPECT_FALSE(Json::parse(model.source_json).contains("mixer"));
  json["mixer"] = "swa_sink_tokens";
  EXPECT_NE(refusal(json), "");
  json["sink_tokens"] = 4;
  EXPECT_EQ(parse(json).mixers[35], (MixerSettings{112, Sink::tokens, 4, States::none, Mix::gate}));
  json["mixer"] = "other";
  EXPECT_NE(refusal(json), "");
}

TEST(HfConfig, RefusesMalformedMixers) {
  ModelConfig model = parse(testing::tiny_qwen2());
  model.mixers = make_mixers("bifocal", 16, {}, model);
  const Json good = Json::parse(write_hf_config(model));
  EXPECT_EQ(refusal(good), "");
  Json bad = good;
  bad["mixers"].erase(1);
  EXPECT_NE(refusal(bad).find("mixers must be a list of 2"), std::string::npos);
  for (const Refused& change :
       std::initializer_list<Refused>{{"window", "half", "window must be a whole number"},
                                      {"window", -1, "window must lie between 0 and"},
                                      {"window", nullptr, "lacks window"},
                                      {"sink", "some", "some"},
                                      {"states", 2, "states must be a string"},
                                      {"mix", "max", "max"},
                                      {"sink_tokens", 3, "sink_tokens is 3 with sink = learned"},
                                      {"colour", "red", "no mixer setting \"colour\""}}) {
    bad = good;
    bad["mixers"][0][change.key] = change.value;
    EXPECT_NE(refusal(bad).find(change.reason), std::string::npos)
        << change.key << " got: " << refusal(bad);
  }
  EXPECT_NE(refusal(without(good, "base_model_type")).find("lacks base_model_type"),
            std::string::npos);
}

}  // namespace
}  // namespace bifocal
