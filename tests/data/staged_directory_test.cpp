// A directory that appears only when it is whole: leftovers, locks, what is not ours.
#include "data/staged_directory.h"

#include <filesystem>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

namespace fs = std::filesystem;

class StagedDirectoryTest : public testing::Test {
 protected:
  std::string fault(const std::string& name) const {
    return test::error_of([&] { const StagedDirectory directory(name); });
  }

  test::TemporaryDirectory directory_;
  std::string out_ = directory_.path("deep/out");
};

TEST_F(StagedDirectoryTest, AppearsWhenItIsPublished) {
  {
    StagedDirectory directory(out_ + "/");
    write_file_atomically(directory.staged() / "train-00000.h5", "x");
    EXPECT_FALSE(fs::exists(out_));
    directory.publish();
  }
  EXPECT_EQ(read_file(out_ + "/train-00000.h5"), "x");
  EXPECT_FALSE(fs::exists(out_ + "/.lock"));
  EXPECT_FALSE(fs::exists(out_ + ".partial"));
  EXPECT_NE(fault(out_).find("holds something already"), std::string::npos);
  EXPECT_FALSE(fs::exists(out_ + ".partial"));
}

TEST_F(StagedDirectoryTest, GoesWhereItIsNotPublished) {
  {
    const StagedDirectory directory(out_);
    write_file_atomically(directory.staged() / "train-00000.h5", "x");
  }
  EXPECT_FALSE(fs::exists(out_));
  EXPECT_FALSE(fs::exists(out_ + ".partial"));
}

TEST_F(StagedDirectoryTest, AnEmptyDirectoryIsReplaced) {
  fs::create_directories(out_);
  StagedDirectory directory(out_);
  write_file_atomically(directory.staged() / "train-00000.h5", "x");
  directory.publish();
  EXPECT_TRUE(fs::exists(out_ + "/train-00000.h5"));
}

TEST_F(StagedDirectoryTest, WhatAKilledRunLeftIsRemoved) {
  fs::create_directories(out_ + ".partial");
  for (const char* name : {".lock", "train-00000.h5", "held_out-00012.h5.partial"}) {
    write_file_atomically(out_ + ".partial/" + name, "old");
  }
  StagedDirectory directory(out_);
  EXPECT_FALSE(fs::exists(out_ + ".partial/train-00000.h5"));
  write_file_atomically(directory.staged() / "train-00001.h5", "new");
  directory.publish();
  EXPECT_FALSE(fs::exists(out_ + "/held_out-00012.h5.partial"));
  EXPECT_EQ(read_file(out_ + "/train-00001.h5"), "new");
}

TEST_F(StagedDirectoryTest, ASecondRunIsRefusedWhileTheFirstLives) {
  std::optional<StagedDirectory> first(std::in_place, out_);
  write_file_atomically(first->staged() / "train-00000.h5", "x");
  EXPECT_NE(fault(out_).find("another run is writing"), std::string::npos);
  EXPECT_TRUE(fs::exists(out_ + ".partial/train-00000.h5"));
  first.reset();
  EXPECT_EQ(fault(out_), "");
}

TEST_F(StagedDirectoryTest, ForeignFilesAreLeftAlone) {
  fs::create_directories(out_ + ".partial");
  for (const char* name :
       {"thesis.tex", "train-1.h5", "xtrain-00000.h5", "train-00000.h5.partial.bak"}) {
    const std::string path = out_ + ".partial/" + name;
    write_file_atomically(path, "mine");
    EXPECT_NE(fault(out_).find(name), std::string::npos) << fault(out_);
    EXPECT_EQ(read_file(path), "mine");
    EXPECT_FALSE(fs::exists(out_ + ".partial/.lock"));
    fs::remove(path);
  }
  fs::remove(out_ + ".partial");
  write_file_atomically(out_ + ".partial", "mine");
  EXPECT_NE(fault(out_).find("is in the way"), std::string::npos) << fault(out_);
  EXPECT_EQ(read_file(out_ + ".partial"), "mine");
}

TEST_F(StagedDirectoryTest, NamesThatCannotBeMadeAreRefused) {
  EXPECT_NE(fault("").find("wanted the name"), std::string::npos);
  EXPECT_NE(fault("..").find("wanted the name"), std::string::npos);
  EXPECT_NE(fault("/").find("wanted the name"), std::string::npos);
  write_file_atomically(directory_.path("file"), "x");
  EXPECT_NE(fault(directory_.path("file/out")).find("cannot make"), std::string::npos);
  EXPECT_NE(fault(directory_.path("file")).find("holds something already"), std::string::npos);
}

}  // namespace
}  // namespace bifocal
