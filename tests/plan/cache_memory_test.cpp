// Cache sizes that the article and the specification state.
#include "plan/cache_memory.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_shapes.h"
#include "hf/model_shape.h"
#include "plan/parameter_table.h"

namespace bifocal {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

using Json = nlohmann::ordered_json;

// The Qwen3.5-4B shape: hybrid, its decoder nested in a vision-language model.
Json qwen35_4b() {
  std::vector<std::string> types;
  for (int layer = 0; layer < 32; ++layer) {
    types.emplace_back((layer + 1) % 4 == 0 ? "full_attention" : "linear_attention");
  }
  const Json text{{"model_type", "qwen3_5_text"},
                  {"hidden_size", 2560},
                  {"intermediate_size", 9216},
                  {"num_hidden_layers", 32},
                  {"vocab_size", 248320},
                  {"num_attention_heads", 16},
                  {"num_key_value_heads", 4},
                  {"head_dim", 256},
                  {"layer_types", types},
                  {"linear_num_value_heads", 32},
                  {"linear_num_key_heads", 16},
                  {"linear_key_head_dim", 128},
                  {"linear_value_head_dim", 128},
                  {"linear_conv_kernel_dim", 4},
                  {"attn_output_gate", true}};
  return {{"model_type", "qwen3_5"}, {"tie_word_embeddings", true}, {"text_config", text}};
}

ModelShape parse(const Json& json) {
  return parse_model_shape(json.dump(), "test");
}

ModelConfig student(const ModelShape& shape, const char* preset, std::int64_t budget) {
  ModelConfig model = shape.model;
  model.mixers = make_mixers(preset, budget, {}, model);
  return model;
}

TEST(CacheMemory, FourStudentsOfQwen3TakeTheSame) {
  const ModelShape shape = parse(testing::qwen3_4b());
  EXPECT_EQ(cached_token_bytes(shape.model), 4096.0);
  for (const std::string& preset : preset_names()) {
    const ModelConfig model = student(shape, preset.c_str(), 576);
    EXPECT_EQ(layer_cache_bytes(model.mixers[0], model, 40960), 2.25 * kMiB) << preset;
    EXPECT_EQ(sequence_cache_bytes(model, 40960), 81.0 * kMiB) << preset;
  }
}

TEST(CacheMemory, TeacherCachesTheContext) {
  const ModelShape shape = parse(testing::qwen3_4b());
  EXPECT_EQ(sequence_cache_bytes(shape.model, 40960), 36.0 * 40960.0 * 4096.0);
  ASSERT_TRUE(shape.native.has_value());
  EXPECT_TRUE(shape.native->is_full_attention());
  EXPECT_EQ(native_cache_bytes(*shape.native, shape.model, 40960), 36.0 * 40960.0 * 4096.0);
}

TEST(CacheMemory, StudentsOfTheQwen35ShapeHaveTheStatedSizes) {
  const ModelShape shape = parse(qwen35_4b());
  EXPECT_EQ(shape.type, "qwen3_5_text");
  const ModelConfig window = student(shape, "swa_learned_sink", 576);
  const ModelConfig bifocal = student(shape, "bifocal", 576);
  EXPECT_EQ(bifocal.mixers[0].window, 320);
  EXPECT_EQ(layer_cache_bytes(bifocal.mixers[0], bifocal, 1), 2.25 * kMiB);
  EXPECT_EQ(layer_cache_bytes(window.mixers[0], window, 1), 2.25 * kMiB);
  // With q/k norms, without the output gate of the model's own attention.
  EXPECT_EQ(ParameterTable(window).total(), 3'739'667'456);   // 3.7397 billion
  EXPECT_EQ(ParameterTable(bifocal).total(), 3'783'577'216);  // 3.7836 billion
  EXPECT_EQ(least_budget("bifocal_query", shape.model), 1025);
  EXPECT_THROW(student(shape, "bifocal_query", 576), Error);
}

TEST(CacheMemory, HybridLayersAreCountedAsTheyAre) {
  const ModelShape shape = parse(qwen35_4b());
  ASSERT_TRUE(shape.native.has_value());
  EXPECT_FALSE(shape.native->is_full_attention());
  // 32 states of 128 x 128 in float32; 3 inputs of 2 * 16 * 128 + 32 * 128 channels in bf16.
  const double linear = 32.0 * 128 * 128 * 4 + 3.0 * 8192 * 2;
  EXPECT_EQ(shape.native->linear.cache_bytes(), linear);
  EXPECT_EQ(native_cache_bytes(*shape.native, shape.model, 1000),
            24.0 * linear + 8.0 * 1000.0 * 4096.0);
  Json interval = qwen35_4b();
  interval["text_config"].erase("layer_types");
  interval["text_config"]["full_attention_interval"] = 4;
  EXPECT_EQ(parse(interval).native->layers, shape.native->layers);
  Json unknown = qwen35_4b();
  unknown["text_config"]["layer_types"][0] = "mamba";
  EXPECT_FALSE(parse(unknown).native.has_value());
}

TEST(CacheMemory, SlidingLayersAreBoundedByTheirWindow) {
  Json json = testing::smollm2_135m();
  json["model_type"] = "mistral";
  json["sliding_window"] = 100;
  const ModelShape shape = parse(json);
  EXPECT_EQ(native_cache_bytes(*shape.native, shape.model, 1000), 30.0 * 100.0 * 768.0);
  EXPECT_EQ(native_cache_bytes(*shape.native, shape.model, 50), 30.0 * 50.0 * 768.0);
  json["use_sliding_window"] = false;
  EXPECT_TRUE(parse(json).native->is_full_attention());
}

TEST(CacheMemory, ShapesOfModelsThatCannotBeTrainedHereAreRead) {
  Json json = testing::qwen3_4b();
  json["model_type"] = "qwen3_moe";
  json["num_experts"] = 128;
  EXPECT_FALSE(parse(json).has_dense_mlp);
  json["kv_lora_rank"] = 512;
  EXPECT_THROW(parse(json), Error);
  json = testing::qwen3_4b();
  json.erase("hidden_size");
  EXPECT_THROW(parse(json), Error);
}

TEST(CacheMemory, SequencesFillWhatTheWeightsLeave) {
  EXPECT_EQ(sequences_that_fit(100.0, 40.0, 20.0), 3);
  EXPECT_EQ(sequences_that_fit(100.0, 41.0, 20.0), 2);
  EXPECT_EQ(sequences_that_fit(100.0, 140.0, 20.0), 0);
}

TEST(ModelShape, SizesBeyondBeliefAreRefused) {
  for (const auto& [key, value] : {std::pair{"num_hidden_layers", std::int64_t{1000000000}},
                                   {"hidden_size", std::int64_t{1} << 40},
                                   {"head_dim", std::int64_t{1} << 20}}) {
    Json json = testing::qwen3_4b();
    json["model_type"] = "another";
    json[key] = value;
    EXPECT_THROW(parse(json), Error) << key;
  }
}

}  // namespace
}  // namespace bifocal
