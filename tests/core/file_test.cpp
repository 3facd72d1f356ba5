// Reading and atomic writing of files.
#include "core/file.h"

#include <cstddef>
#include <iterator>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

#include "core/error.h"

namespace bifocal {

namespace {

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory =
        std::filesystem::temp_directory_path() / ("bifocal_file_" + std::to_string(::getpid()));
    std::filesystem::create_directories(directory);
  }

  void TearDown() override { std::filesystem::remove_all(directory); }

  std::ptrdiff_t entries() const {
    return std::distance(std::filesystem::directory_iterator(directory), {});
  }

  std::filesystem::path directory;
};

}  // namespace

TEST_F(FileTest, WrittenBytesComeBack) {
  std::string text(200000, 'x');
  text[70000] = '\0';
  for (const std::string& wanted : {text, std::string(), std::string(65536, 'y')}) {
    write_file_atomically(directory / "a", wanted);
    EXPECT_EQ(read_file(directory / "a"), wanted);
    EXPECT_EQ(entries(), 1) << "a temporary file was left";
  }
}

TEST_F(FileTest, ErrorsNameTheFile) {
  try {
    read_file(directory / "missing");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("missing"), std::string::npos) << error.what();
  }
  EXPECT_THROW(read_file(directory), Error);
  EXPECT_THROW(write_file_atomically(directory / "no" / "file", "x"), Error);
  EXPECT_THROW(fsync_directory(directory / "no"), Error);
}

TEST_F(FileTest, AFailedWriteLeavesNothingAndTheOldFile) {
  std::filesystem::create_directory(directory / "taken");
  EXPECT_THROW(write_file_atomically(directory / "taken", "x"), Error);
  EXPECT_EQ(entries(), 1);
  EXPECT_TRUE(std::filesystem::is_directory(directory / "taken"));
}

TEST_F(FileTest, FlushesFilesAndDirectories) {
  write_file_atomically(directory / "a", "x");
  fsync_file(directory / "a");
  fsync_directory(directory);
  EXPECT_THROW(fsync_directory(directory / "a"), Error);
}

}  // namespace bifocal
