// SHA-256 against the published examples (FIPS 180-2), and hashing of files.
#include "core/sha256.h"

#include <filesystem>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"

namespace bifocal {

TEST(Sha256, MatchesPublishedExamples) {
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, DoesNotDependOnThePieces) {
  Sha256 hash;
  hash.add("a", 1);
  hash.add(nullptr, 0);
  hash.add("bc", 2);
  EXPECT_EQ(hash.hex(), sha256_hex("abc"));
}

TEST(Sha256, HashesFilesLongerThanItsBuffer) {
  const auto path =
      std::filesystem::temp_directory_path() / ("bifocal_sha256_" + std::to_string(::getpid()));
  const std::string text(3000001, 'z');
  write_file_atomically(path, text);
  EXPECT_EQ(sha256_hex_of_file(path), sha256_hex(text));
  std::filesystem::remove(path);
  EXPECT_THROW(sha256_hex_of_file(path), Error);
  EXPECT_THROW(sha256_hex_of_file(std::filesystem::temp_directory_path()), Error);
}

}  // namespace bifocal
