// Reading configurations: precedence, errors with their places, round trips, the shipped files.
#include "config/read.h"

#include <filesystem>
#include <fstream>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "config/options.h"
#include "core/error.h"

namespace bifocal {
namespace {

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text, const std::string& name = "one")
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("bifocal_read_test_{}_{}.toml", name, getpid())) {
    std::ofstream(path_) << text;
  }

  ~TemporaryFile() { std::filesystem::remove(path_); }

  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string error_of(const std::string& text, const std::vector<Override>& overrides = {}) {
  const TemporaryFile file(text);
  try {
    read_run_config({file.path()}, overrides);
  } catch (const Error& error) {
    std::string what = error.what();
    const std::size_t at = what.find(file.path());
    return at == std::string::npos ? what : what.replace(at, file.path().size(), "FILE");
  }
  return "";
}

TEST(Read, StrayCharactersAreErrorsOfTheirLine) {
  for (const char* line :
       {"[?]", "[\x0f]", "[\xc3\xa9]", "\xc3\xa9 = 1", "\xef\xb2\xbf = 1", "[a\xc3\xa9]"}) {
    const std::string error = error_of(std::string("[run]\n") + line + "\n");
    EXPECT_NE(error.find("wanted a TOML file"), std::string::npos) << line << ": " << error;
    EXPECT_NE(error.find("FILE, line 2"), std::string::npos) << line << ": " << error;
  }
}

TEST(Read, DefaultThenFileThenCommandLine) {
  const TemporaryFile file("[align]\nsteps = 7\nrate = 0.5\n[data]\ntrain = [\"a\"]\n");
  const RunConfig config =
      read_run_config({file.path()}, {{"align.rate", {"0.25"}}, {"data.train", {"b", "c"}}});
  EXPECT_EQ(config.align.clip, 1.0);
  EXPECT_EQ(config.align.steps, 7);
  EXPECT_EQ(config.align.rate, 0.25);
  EXPECT_EQ(config.data.train, (std::vector<std::string>{"b", "c"}));
}

TEST(Read, ALaterFileChangesWhatItNames) {
  const TemporaryFile student("[align]\nsteps = 7\nrate = 0.5\n[mesh]\ndata = 0\n", "student");
  const TemporaryFile machine("[mesh]\ndata = 8\n[align]\nrate = 0.25\n", "machine");
  const RunConfig config =
      read_run_config({student.path(), machine.path()}, {{"mesh.sequence", {"2"}}});
  EXPECT_EQ(config.align.steps, 7);
  EXPECT_EQ(config.align.rate, 0.25);
  EXPECT_EQ(config.mesh.data, 8);
  EXPECT_EQ(config.mesh.sequence, 2);
  EXPECT_EQ(read_run_config({machine.path(), student.path()}).align.rate, 0.5);
  // Each file is refused for itself.
  const TemporaryFile broken("[mesh]\ndata = 8\ndata = 8\n", "broken");
  EXPECT_THROW(read_run_config({student.path(), broken.path()}), Error);
}

TEST(Read, NoFileMeansDefaultsAndOverrides) {
  const RunConfig config = read_run_config({}, {{"run.seed", {"3"}}});
  EXPECT_EQ(config.run.seed, 3);
  EXPECT_EQ(config.align.steps, 2500);
}

TEST(Read, UnknownKeysNameTheNearestKnownOneAndTheirLine) {
  EXPECT_EQ(error_of("[data]\nseed = 1\nrow_token = 2\n"),
            "[config] unknown key data.row_token (FILE, line 3): did you mean data.row_tokens?");
  EXPECT_EQ(error_of("[trian]\nx = 1\n"),
            "[config] unknown section [trian] (FILE, line 1): did you mean [run]?");
  EXPECT_EQ(error_of("run_seed = 1\n"),
            "[config] unknown key run_seed (FILE, line 1): keys stand in sections, did you mean "
            "run.seed?");
  EXPECT_EQ(error_of("", {{"align.step", {"1"}}}),
            "[config] unknown key align.step (command line): did you mean align.steps?");
}

TEST(Read, WrongTypesAndRangesNameKeyAndLine) {
  EXPECT_EQ(error_of("[align]\n\nsteps = -1\n"),
            "[config] align.steps: wanted an integer of at least 0 (steps), got -1 (FILE, line 3)");
  EXPECT_EQ(error_of("[align]\nsteps = \"3\"\n"),
            "[config] align.steps: wanted an integer of at least 0 (steps), got \"3\" (FILE, line "
            "2)");
  EXPECT_EQ(error_of("[data]\ntrain = [1]\n"),
            "[config] data.train: wanted a list of texts, got a value of TOML type integer (FILE, "
            "line 2)");
  EXPECT_EQ(error_of("[run]\nseed = 1979-05-27\n"),
            "[config] run.seed: wanted an integer of at least 0, got a value of TOML type date "
            "(FILE, line 2)");
  EXPECT_EQ(error_of("[student]\nsink_start = nan\n"),
            "[config] student.sink_start: wanted a number, got nan (FILE, line 2)");
  EXPECT_EQ(error_of("", {{"align.rate", {"fast"}}}),
            "[config] align.rate: wanted a number above 0, got \"fast\" (command line)");
}

TEST(Read, RepeatedKeysAndBrokenFilesNameTheirLine) {
  const std::string repeated = error_of("[align]\nsteps = 1\nsteps = 2\n");
  EXPECT_NE(repeated.find("steps"), std::string::npos) << repeated;
  EXPECT_NE(repeated.find("(FILE, line 3)"), std::string::npos) << repeated;
  const std::string broken = error_of("[align\n");
  EXPECT_NE(broken.find("(FILE, line 1)"), std::string::npos) << broken;
}

TEST(Read, MissingFilesAndDirectoriesAreErrors) {
  EXPECT_THROW(read_run_config({"no/such/file.toml"}), Error);
  EXPECT_THROW(read_run_config({std::filesystem::temp_directory_path().string()}), Error);
}

TEST(Read, AnEmptyFileIsTheDefaults) {
  EXPECT_EQ(error_of(""), "");
}

TEST(Read, ContradictionsAreErrors) {
  EXPECT_NE(error_of("[align]\nrate = 1e-6\n").find("align.final_rate"), std::string::npos);
  EXPECT_EQ(error_of("[align]\nrate = 1e-6\nschedule = \"constant\"\n"), "");
  EXPECT_NE(error_of("[mesh]\ndata = 0\nsequence = 0\n").find("mesh.data"), std::string::npos);
}

// A value that differs from the default and is accepted.
OptionValue other_value(const Option& option, const OptionValue& value) {
  if (!option.words.empty()) {
    return option.words.back();
  }
  if (const auto* is_on = std::get_if<bool>(&value)) {
    return !*is_on;
  }
  if (const auto* integer = std::get_if<std::int64_t>(&value)) {
    return *integer + 1;
  }
  if (const auto* real = std::get_if<double>(&value)) {
    return *real / 3 + 1e-7;
  }
  if (std::holds_alternative<std::string>(value)) {
    return "a \"b\" \\ \t \xc3\xa9";
  }
  return std::vector<std::string>{"4-7:window=64,sink=learned", ""};
}

TEST(Read, ATrainListBesideAMixtureIsRefused) {
  EXPECT_EQ(parse_run_config("[data]\nmixture = \"a.toml\"", "FILE").data.mixture, "a.toml");
  try {
    parse_run_config("[data]\ntrain = [\"b\"]\nmixture = \"a.toml\"", "FILE");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("data.train and data.mixture both name data"),
              std::string::npos);
  }
}

TEST(Read, KeptLayersNeedALevelThatKeepsLess) {
  EXPECT_EQ(
      parse_run_config("[memory]\nrecompute = \"mlp\"\nkept_layers = 3", "FILE").memory.kept_layers,
      3);
  for (const char* recompute : {"auto", "none"}) {
    try {
      parse_run_config(fmt::format("[memory]\nrecompute = \"{}\"\nkept_layers = 3", recompute),
                       "FILE");
      FAIL() << recompute;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("memory.kept_layers is 3, wanted 0"),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(Read, TheResolvedFileReadsBackEqual) {
  RunConfig config;
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      set_value(option, other_value(option, get_value(option, config)), "test", config);
    }
  }
  config.data.mixture.clear();        // is given instead of data.train
  config.memory.recompute = "light";  // kept layers keep more than it
  const std::string text = to_toml(config);
  RunConfig again = parse_run_config(text, "resolved");
  EXPECT_EQ(to_toml(again), text);
  for (const OptionSection& section : option_sections()) {
    for (const Option& option : section.options) {
      EXPECT_EQ(get_value(option, again), get_value(option, config)) << option.key;
    }
  }
}

TEST(Read, EveryShippedConfigurationIsValidAndNamedAfterItsStudent) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(BIFOCAL_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".toml" || entry.path().parent_path().stem() == "machines") {
      continue;  // what describes a machine stands beside a student's file
    }
    const RunConfig config = read_run_config({entry.path().string()});
    EXPECT_EQ(config.student.preset, entry.path().stem()) << entry.path();
    EXPECT_FALSE(config.run.directory.empty()) << entry.path();
    EXPECT_FALSE(config.teacher.path.empty()) << entry.path();
    EXPECT_NE(config.data.train.empty(), config.data.mixture.empty()) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 10);
}

}  // namespace
}  // namespace bifocal
