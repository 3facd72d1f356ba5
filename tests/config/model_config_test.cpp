// Mixer settings: presets, memory, overrides, checks.
#include "config/model_config.h"

#include <utility>

#include <gtest/gtest.h>

#include "core/error.h"
#include "support/error_of.h"

namespace bifocal {
namespace {

ModelConfig qwen3_4b() {
  ModelConfig model;
  model.hidden = 2560;
  model.layers = 36;
  model.heads = 32;
  model.kv_heads = 8;
  model.head_dim = 128;
  return model;
}

using test::error_of;

TEST(ModelConfig, PresetsOfQwen3HaveTheArticlesWindowsAndMemory) {
  const ModelConfig model = qwen3_4b();
  const std::pair<const char*, std::int64_t> windows[] = {
      {"swa_learned_sink", 576}, {"swa_sink_tokens", 572}, {"bifocal", 448}, {"bifocal_query", 64}};
  for (const auto& [preset, window] : windows) {
    const MixerSettings mixer = preset_mixer(preset, model, 576);
    EXPECT_EQ(mixer.window, window) << preset;
    EXPECT_EQ(cached_tokens(mixer, model), 576.0) << preset;
    EXPECT_NO_THROW(check_mixer(mixer, model, 0));
  }
  EXPECT_EQ(preset_mixer("swa_sink_tokens", model, 576).sink_tokens, 4);
}

TEST(ModelConfig, GroupsThatAreNoPowerOfTwoFillTheBudgetExactly) {
  ModelConfig model = qwen3_4b();
  model.heads = 9;
  model.kv_heads = 3;
  model.head_dim = 64;
  for (const std::string& preset : preset_names()) {
    EXPECT_EQ(cached_tokens(preset_mixer(preset, model, 300), model), 300.0) << preset;
  }
}

TEST(ModelConfig, PresetThatCannotFitSaysWhatItNeeds) {
  ModelConfig model = qwen3_4b();
  model.heads = 16;
  model.kv_heads = 4;
  model.head_dim = 256;
  EXPECT_EQ(preset_mixer("bifocal", model, 576).window, 320);
  const std::string text = error_of([&] { preset_mixer("bifocal_query", model, 576); });
  EXPECT_NE(text.find("at least 1025"), std::string::npos) << text;
  EXPECT_NO_THROW(preset_mixer("bifocal_query", model, 1025));
}

TEST(ModelConfig, UnknownPresetListsTheKnownOnes) {
  const std::string text = error_of([] { preset_mixer("bifocall", qwen3_4b(), 576); });
  EXPECT_NE(text.find("swa_learned_sink, swa_sink_tokens, bifocal, bifocal_query"),
            std::string::npos)
      << text;
}

TEST(ModelConfig, OverridesChangeTheNamedLayersOnly) {
  const ModelConfig model = qwen3_4b();
  const auto mixers = make_mixers("bifocal",
                                  576,
                                  {"3:window=full",
                                   "4-7:window=64,sink=learned,states=query,mix=sum",
                                   "8:window=0",
                                   "9:sink=tokens",
                                   "10:states=none,sink=tokens,sink_tokens=2"},
                                  model);
  ASSERT_EQ(mixers.size(), 36U);
  const MixerSettings preset = preset_mixer("bifocal", model, 576);
  EXPECT_EQ(mixers[2], preset);
  EXPECT_EQ(mixers[3], MixerSettings{});
  for (int layer = 4; layer <= 7; ++layer) {
    EXPECT_EQ(mixers[static_cast<std::size_t>(layer)],
              (MixerSettings{64, Sink::learned, 0, States::query, Mix::sum}));
  }
  EXPECT_EQ(mixers[8], (MixerSettings{0, Sink::none, 0, States::kv, Mix::gate}));
  EXPECT_EQ(mixers[9], (MixerSettings{448, Sink::tokens, 4, States::kv, Mix::gate}));
  EXPECT_EQ(mixers[10], (MixerSettings{448, Sink::tokens, 2, States::none, Mix::gate}));
  EXPECT_EQ(mixers[11], preset);
}

TEST(ModelConfig, MalformedOverridesAreRefused) {
  const ModelConfig model = qwen3_4b();
  for (const char* text : {"window=64",
                           "3",
                           "3:window",
                           "3:windw=64",
                           "3:window=-1",
                           "3:window=6x",
                           "36:window=64",
                           "7-4:window=64",
                           "1-2-3:window=64",
                           "x:window=64",
                           "3:sink=maybe",
                           "3:states=all",
                           "3:mix=max",
                           "3:window=",
                           "3:sink=tokens,sink_tokens=0",
                           "3:sink_tokens=2"}) {
    EXPECT_THROW(make_mixers("bifocal", 576, {text}, model), Error) << text;
  }
  EXPECT_THROW(make_mixers("swa_learned_sink", 576, {"3:window=0"}, model), Error);
}

TEST(ModelConfig, ContradictionsAreRefused) {
  const ModelConfig model = qwen3_4b();
  const MixerSettings full = {};
  EXPECT_NO_THROW(check_mixer(full, model, 35));
  EXPECT_THROW(check_mixer(full, model, 36), Error);
  EXPECT_THROW(check_mixer({-1, Sink::learned, 0, States::none, Mix::gate}, model, 0), Error);
  EXPECT_THROW(check_mixer({-1, Sink::none, 0, States::kv, Mix::gate}, model, 0), Error);
  EXPECT_THROW(check_mixer({0, Sink::none, 0, States::none, Mix::gate}, model, 0), Error);
  EXPECT_THROW(check_mixer({0, Sink::learned, 0, States::kv, Mix::gate}, model, 0), Error);
  EXPECT_THROW(check_mixer({-2, Sink::none, 0, States::kv, Mix::gate}, model, 0), Error);
  EXPECT_THROW(check_mixer({8, Sink::tokens, 0, States::kv, Mix::gate}, model, 0), Error);
  EXPECT_THROW(check_mixer({8, Sink::learned, 4, States::kv, Mix::gate}, model, 0), Error);
  EXPECT_THROW(cached_tokens(full, model), Error);
}

TEST(ModelConfig, GateTensorsExistOnlyWhereTwoBranchesAreGated) {
  EXPECT_TRUE((MixerSettings{8, Sink::none, 0, States::kv, Mix::gate}.has_gate()));
  EXPECT_FALSE((MixerSettings{8, Sink::none, 0, States::kv, Mix::sum}.has_gate()));
  EXPECT_FALSE((MixerSettings{8, Sink::none, 0, States::none, Mix::gate}.has_gate()));
  EXPECT_FALSE((MixerSettings{0, Sink::none, 0, States::kv, Mix::gate}.has_gate()));
}

TEST(ModelConfig, DescriptionsNameTheParts) {
  const ModelConfig model = qwen3_4b();
  EXPECT_EQ(describe(preset_mixer("bifocal", model, 576)),
            "window 448, learned sink, states per key-value head, gate");
  EXPECT_EQ(describe(preset_mixer("swa_sink_tokens", model, 576)), "window 572, 4 sink tokens");
  EXPECT_EQ(describe({}), "full attention");
  EXPECT_EQ(describe({0, Sink::none, 0, States::query, Mix::gate}),
            "no window, states per query head");
}

}  // namespace
}  // namespace bifocal
