// The option table: complete, documented, checked; values survive printing.
#include "config/options.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>

#include <gtest/gtest.h>

#include "config/documentation.h"
#include "core/error.h"
#include "support/error_of.h"

namespace bifocal {
namespace {

const Option& option_of(const std::string& key) {
  const Option* option = find_option(key);
  EXPECT_NE(option, nullptr) << key;
  return *option;
}

std::string error_of(const std::string& key, const OptionValue& value) {
  return test::error_of([&] {
    RunConfig config;
    set_value(option_of(key), value, "here", config);
  });
}

TEST(Options, EveryOptionHasAUniqueKeyOfItsSectionHelpAndAValidDefault) {
  std::set<std::string> keys;
  for (const OptionSection& section : option_sections()) {
    EXPECT_FALSE(section.help.empty()) << section.name;
    for (const Option& option : section.options) {
      EXPECT_TRUE(keys.insert(option.key).second) << option.key;
      EXPECT_EQ(option.key.rfind(section.name + ".", 0), 0U) << option.key;
      EXPECT_FALSE(option.help.empty()) << option.key;
      RunConfig config;
      const OptionValue value = get_value(option, config);
      EXPECT_NO_THROW(set_value(option, value, "default", config)) << option.key;
    }
  }
}

TEST(Options, NoTwoOptionsShareAField) {
  RunConfig config;
  std::set<const void*> fields;
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      const void* address =
          std::visit([&](const auto& field) { return static_cast<const void*>(&field(config)); },
                     option.field);
      EXPECT_TRUE(fields.insert(address).second) << option.key;
    }
  }
}

TEST(Options, DefaultsAreTheRecipe) {
  const RunConfig config;
  EXPECT_EQ(config.align.steps, 2500);
  EXPECT_EQ(config.align.rate, 1e-2);
  EXPECT_EQ(config.align.final_rate, 1e-5);
  EXPECT_EQ(config.align.schedule, "cosine");
  EXPECT_EQ(config.distill.steps, 10000);
  EXPECT_EQ(config.distill.rate, 1e-5);
  EXPECT_EQ(config.distill.schedule, "constant");
  EXPECT_EQ(config.pretrain.steps, 3000);
  EXPECT_EQ(config.pretrain.final_rate, 2e-5);
  EXPECT_EQ(config.optimizer.beta2, 0.95);
  EXPECT_EQ(config.data.row_tokens * config.data.rows_per_step, 327680);
}

TEST(Options, NearestKeyNeedsTheFewestEdits) {
  EXPECT_EQ(nearest_key("data.row_token"), "data.row_tokens");
  EXPECT_EQ(nearest_key("distil.steps"), "distill.steps");
  EXPECT_EQ(nearest_key("optimiser.beta1"), "optimizer.beta1");
  EXPECT_EQ(nearest_section("checkpoints"), "checkpoint");
}

TEST(Options, WrongTypesAreNamed) {
  EXPECT_EQ(error_of("data.row_tokens", std::string("many")),
            "[config] data.row_tokens: wanted an integer of at least 1 (tokens), got \"many\" "
            "(here)");
  EXPECT_NE(error_of("data.row_tokens", 1024.0), "");
  EXPECT_NE(error_of("evaluate.reach", std::int64_t{1}), "");
  EXPECT_NE(error_of("run.directory", true), "");
  EXPECT_NE(error_of("data.train", std::string("a")), "");
}

TEST(Options, ValuesOutOfRangeAreNamed) {
  EXPECT_EQ(
      error_of("align.warmup", 1.5),
      "[config] align.warmup: wanted a number of at least 0 and of at most 1, got 1.5 (here)");
  EXPECT_EQ(error_of("distill.temperature", 0.0),
            "[config] distill.temperature: wanted a number above 0, got 0.0 (here)");
  EXPECT_EQ(error_of("align.trainable", std::string("all")),
            "[config] align.trainable: wanted one of new, mixer, got \"all\" (here)");
  EXPECT_NE(error_of("optimizer.beta1", 1.0), "");
  EXPECT_NE(error_of("student.sink_start", std::nan("")), "");
  EXPECT_NE(error_of("student.sink_start", std::numeric_limits<double>::infinity()), "");
}

TEST(Options, AnIntegerIsARealButNotTheOtherWayRound) {
  RunConfig config;
  set_value(option_of("align.clip"), std::int64_t{2}, "here", config);
  EXPECT_EQ(config.align.clip, 2.0);
}

TEST(Options, CommandLineTextsBecomeValues) {
  EXPECT_EQ(parse_value(option_of("data.row_tokens"), {"12"}, ""), OptionValue(std::int64_t{12}));
  EXPECT_EQ(parse_value(option_of("align.rate"), {"1e-3"}, ""), OptionValue(1e-3));
  EXPECT_EQ(parse_value(option_of("evaluate.reach"), {"true"}, ""), OptionValue(true));
  EXPECT_EQ(parse_value(option_of("data.row_tokens"), {"12x"}, ""),
            OptionValue(std::string("12x")));
  EXPECT_EQ(parse_value(option_of("data.train"), {"a", "b"}, ""),
            OptionValue(std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(parse_value(option_of("data.train"), {""}, ""),
            OptionValue(std::vector<std::string>{}));
  EXPECT_THROW(parse_value(option_of("align.rate"), {"1", "2"}, ""), Error);
}

TEST(Options, PrintedValuesAreToml) {
  EXPECT_EQ(format_toml(3.0), "3.0");
  EXPECT_EQ(format_toml(1e-5), "1e-05");
  EXPECT_EQ(format_toml(std::string("a\"b\\c\n")), "\"a\\\"b\\\\c\\u000A\"");
  EXPECT_EQ(format_toml(std::vector<std::string>{"a", "b"}), "[\"a\", \"b\"]");
}

TEST(Documentation, CommittedPageIsCurrent) {
  std::ifstream file(BIFOCAL_SOURCE_DIR "/docs/configuration.md");
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(text.str() == configuration_markdown())
      << "docs/configuration.md is out of date: bifocal config --markdown > docs/configuration.md";
}

TEST(Options, TheComputeTypeFollowsTheDeviceAndMustBeOneOfIts) {
  const auto resolved = [](const std::string& device, const std::string& dtype) {
    RunConfig config;
    config.run.device = device;
    config.run.dtype = dtype;
    return resolved_dtype(config);
  };
  EXPECT_EQ(resolved_dtype(RunConfig{}), "float32");
  EXPECT_EQ(resolved("cpu", "float64"), "float64");
  EXPECT_EQ(resolved("cuda", "auto"), "bfloat16");
  EXPECT_EQ(resolved("cuda", "float32"), "float32");
  for (const auto& [device, dtype] : {std::pair{"cuda", "float64"}, std::pair{"cpu", "bfloat16"}}) {
    const std::string text = test::error_of([&] { (void)resolved(device, dtype); });
    EXPECT_NE(text.find(std::string("got ") + dtype), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace bifocal
