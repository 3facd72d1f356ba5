// Parameter counts of known models and the layout of units.
#include "plan/parameter_table.h"

#include <set>

#include <gtest/gtest.h>

#include "core/error.h"
#include "hf/hf_config.h"
#include "hf/hf_shapes.h"

namespace bifocal {
namespace {

ModelConfig parse(const nlohmann::ordered_json& json) {
  return parse_hf_config(json.dump(), "test");
}

std::int64_t count_new(const ParameterTable& table) {
  std::int64_t elements = 0;
  for (const Parameter& parameter : table.parameters()) {
    elements += parameter.is_new() ? parameter.size() : 0;
  }
  return elements;
}

TEST(ParameterTable, CountsQwen3) {
  const ParameterTable table(parse(testing::qwen3_4b()));
  EXPECT_EQ(table.total(), 4'022'468'096);  // 4,022.47 million
  EXPECT_EQ(table.parameters().size(), 398U);
  EXPECT_EQ(count_new(table), 0);
}

TEST(ParameterTable, CountsSmolLM2) {
  const ParameterTable table(parse(testing::smollm2_135m()));
  EXPECT_EQ(table.total(), 134'515'008);
  EXPECT_EQ(table.parameters().size(), 272U);
}

TEST(ParameterTable, BifocalAddsTwentyEightMillionToQwen3) {
  ModelConfig model = parse(testing::qwen3_4b());
  model.mixers = make_mixers("bifocal", 576, {}, model);
  const ParameterTable table(model);
  // Per layer: sink 32, features (32 + 8) * 128 * 128, i 8 * 2560, f 8 * 2560 + 8, o 32 * 2560
  // + 32.
  EXPECT_EQ(count_new(table),
            36 * (32 + 40 * 128 * 128 + 8 * 2560 + 8 * 2560 + 8 + 32 * 2560 + 32));
  EXPECT_NEAR(static_cast<double>(count_new(table)) / 1e6, 28.0, 0.05);
}

TEST(ParameterTable, SettingsDecideWhichTensorsAreNew) {
  ModelConfig model = parse(testing::tiny_qwen2());
  const auto names = [&](const MixerSettings& mixer) {
    model.mixers = {mixer, MixerSettings{}};
    std::set<std::string> found;
    const ParameterTable table(model);
    for (const Parameter& parameter : table.parameters()) {
      if (parameter.is_new()) {
        EXPECT_FALSE(parameter.decays) << parameter.name;
        found.insert(parameter.name.substr(std::string("model.layers.0.mixer.").size()));
      }
    }
    return found;
  };
  using Names = std::set<std::string>;
  const Names far{"feature_q", "feature_k", "i_gate.weight", "f_gate.weight", "f_gate.bias"};
  Names gated = far;
  gated.insert({"o_gate.weight", "o_gate.bias"});
  EXPECT_EQ(names({}), Names{});
  EXPECT_EQ(names({9, Sink::tokens, 2, States::none, Mix::gate}), Names{});
  EXPECT_EQ(names({9, Sink::learned, 0, States::none, Mix::gate}), Names{"sink"});
  EXPECT_EQ(names({9, Sink::none, 0, States::kv, Mix::sum}), far);
  EXPECT_EQ(names({0, Sink::none, 0, States::kv, Mix::gate}), far);
  EXPECT_EQ(names({9, Sink::none, 0, States::query, Mix::gate}), gated);
}

TEST(ParameterTable, UnitsHoldAlignedParametersWithoutOverlap) {
  ModelConfig model = parse(testing::tiny_qwen2());
  model.mixers = make_mixers("bifocal", 16, {}, model);
  const ParameterTable table(model);
  ASSERT_EQ(table.units().size(), 4U);
  EXPECT_EQ(table.final_unit(), 3);
  EXPECT_EQ(table.at("model.embed_tokens.weight").unit, table.embedding_unit());
  EXPECT_EQ(table.at("model.layers.1.mlp.up_proj.weight").unit, table.layer_unit(1));
  EXPECT_EQ(table.at("lm_head.weight").unit, table.final_unit());
  std::int64_t next = 0;
  for (std::size_t number = 0; number < table.units().size(); ++number) {
    const Unit& unit = table.units()[number];
    EXPECT_EQ(unit.begin, next);
    next = unit.end;
    std::int64_t end = 0;
    for (std::int64_t i = unit.begin; i < unit.end; ++i) {
      const Parameter& parameter = table.parameters()[static_cast<std::size_t>(i)];
      EXPECT_EQ(parameter.unit, static_cast<std::int64_t>(number));
      EXPECT_EQ(parameter.offset % 16, 0);
      EXPECT_GE(parameter.offset, end);
      EXPECT_LT(parameter.offset, end + 16);
      end = parameter.offset + parameter.size();
    }
    EXPECT_EQ(unit.size, end);
  }
  EXPECT_EQ(next, static_cast<std::int64_t>(table.parameters().size()));
}

TEST(ParameterTable, DecayAndMixerSetsFollowTheRecipe) {
  const ParameterTable table(parse(testing::tiny_qwen2()));
  const std::string layer = "model.layers.0.";
  for (const char* name : {"self_attn.q_proj.weight", "self_attn.v_proj.weight"}) {
    EXPECT_TRUE(table.at(layer + name).decays && table.at(layer + name).in_mixer) << name;
  }
  EXPECT_TRUE(table.at(layer + "self_attn.k_proj.bias").in_mixer);
  EXPECT_FALSE(table.at(layer + "self_attn.k_proj.bias").decays);
  EXPECT_TRUE(table.at(layer + "self_attn.o_proj.weight").decays);
  EXPECT_FALSE(table.at(layer + "self_attn.o_proj.weight").in_mixer);
  EXPECT_TRUE(table.at("model.embed_tokens.weight").decays);
  EXPECT_TRUE(table.at("lm_head.weight").decays);
  EXPECT_FALSE(table.at("model.norm.weight").decays);
  EXPECT_THROW(table.at("model.norm.bias"), Error);
}

TEST(ParameterTable, PartsCoverTheUnitInMultiplesOfSixteen) {
  for (const std::int64_t size : {1, 16, 17, 1000, 4097}) {
    for (const std::int64_t ranks : {1, 2, 3, 7}) {
      const std::int64_t part = part_size(size, ranks);
      EXPECT_EQ(part % 16, 0);
      EXPECT_GE(part * ranks, size);
      EXPECT_LT((part - 16) * ranks, size);
    }
  }
}

}  // namespace
}  // namespace bifocal
