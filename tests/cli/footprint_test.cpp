// What a run leaves behind: nothing outside its directory.
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "core/sha256.h"
#include "support/program.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;

// Every file below a directory, with its hash.
std::map<std::string, std::string> files_below(const fs::path& directory) {
  std::map<std::string, std::string> files;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) {
      files[entry.path().string()] = sha256_hex_of_file(entry.path());
    }
  }
  return files;
}

TEST(Footprint, ARunWritesInItsDirectoryAlone) {
  const test::TemporaryDirectory directory;
  for (const std::string& command :
       {"synth register-machine --count 60 --max-steps 3 --seed 1 --output " +
            directory.path("problems.jsonl"),
        "tokenize " + directory.path("problems.jsonl") +
            " --vocabulary 128 --held-out 0.2 --output " + directory.path("data")}) {
    const test::Outcome outcome = test::run_program(command);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.text;
  }
  for (const char* name : {"home", "tmp", "here"}) {
    fs::create_directory(directory.path(name));
  }
  const std::string teacher = BIFOCAL_SOURCE_DIR "/data/register-machine/teacher";
  const auto before = files_below(directory.path(""));
  const auto teacher_before = files_below(teacher);
  const std::string command =
      "cd " + directory.path("here") + " && HOME=" + directory.path("home") +
      " TMPDIR=" + directory.path("tmp") + " \"" BIFOCAL_BINARY "\" train --teacher.path " +
      teacher + " --student.budget 144 --data.train " + directory.path("data") +
      " --data.row_tokens 128 --data.rows_per_step 1 --align.steps 1 --distill.steps 2 "
      "--checkpoint.every 1 --evaluate.every 1 --evaluate.rows 1 --run.directory " +
      directory.path("run") + " > /dev/null 2>&1";
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_TRUE(fs::exists(directory.path("run/metrics.jsonl")));
  fs::remove_all(directory.path("run"));
  EXPECT_EQ(files_below(directory.path("")), before);
  EXPECT_EQ(files_below(teacher), teacher_before);
}

}  // namespace
}  // namespace bifocal
