// config.json: what is read, what is refused, what is written.
#include "hf/hf_config.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_shapes.h"

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

TEST(HfConfig, RefusesWhatChangesTheMathematicsAndNamesIt) {
  const Json base = testing::qwen3_4b();
  const std::pair<const char*, Json> changes[] = {
      {"model_type", "qwen3_moe"},
      {"model_type", "mistral"},
      {"use_sliding_window", true},
      {"layer_types", Json(std::vector<std::string>(36, "sliding_attention"))},
      {"layer_types", Json(std::vector<std::string>(35, "full_attention"))},
      {"attention_bias", true},
      {"mlp_bias", true},
      {"hidden_act", "gelu"},
      {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}}},
      {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
      {"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}},
      {"rope_scaling", {{"factor", 2.0}}},
      {"rope_parameters", {{"rope_theta", 1e6}, {"rope_type", "default"}}},  // disagrees
      {"rope_parameters", {{"rope_theta", 5e6}, {"partial_rotary_factor", 0.5}}},
      {"partial_rotary_factor", 0.25},
      {"num_experts", 64},
      {"quantization_config", {{"quant_method", "fp8"}}},
      {"final_logit_softcapping", 30.0},
      {"architectures", {"Qwen3ForSequenceClassification"}},
      {"auto_map", {{"AutoModelForCausalLM", "modeling_other.Other"}}},
      {"head_dim", 127},
      {"num_key_value_heads", 5},
      {"num_hidden_layers", 0},
      {"hidden_size", 2560.5},
      {"hidden_size", -2560},
      {"vocab_size", "many"},
      {"rms_norm_eps", 0.0},
      {"rope_theta", -1.0},
      {"tie_word_embeddings", "yes"},
      {"mixers", Json::array()}};
  for (const auto& [key, value] : changes) {
    EXPECT_NE(refusal(with(base, key, value)), "") << key << " = " << value.dump();
  }
  for (const char* key : {"model_type",
                          "vocab_size",
                          "hidden_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "intermediate_size",
                          "rope_theta",
                          "max_position_embeddings"}) {
    EXPECT_NE(refusal(without(base, key)), "") << key;
  }
  EXPECT_NE(refusal(with(testing::smollm2_135m(), "sliding_window", 4096)), "");
  EXPECT_NE(refusal(with(base, "mlp_bias", true)).find("mlp_bias = true"), std::string::npos);
  EXPECT_THROW(parse_hf_config("[]", "test"), Error);
  EXPECT_THROW(parse_hf_config("{", "test"), Error);
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
  EXPECT_NE(refusal(bad), "");
  for (const auto& [key, value] :
       std::initializer_list<std::pair<const char*, Json>>{{"window", "half"},
                                                           {"window", -1},
                                                           {"sink", "some"},
                                                           {"states", 2},
                                                           {"mix", "max"},
                                                           {"sink_tokens", 3},
                                                           {"colour", "red"}}) {
    bad = good;
    bad["mixers"][0][key] = value;
    EXPECT_NE(refusal(bad), "") << key;
  }
  EXPECT_NE(refusal(without(good, "base_model_type")), "");
}

}  // namespace
}  // namespace bifocal
