// Token shards: round trip, and what must be refused.
#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "core/random.h"
#include "support/error_of.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

constexpr std::int64_t kVocabulary = 1000;

TokenFileHeader header() {
  return {kVocabulary, vocabulary_hash(kVocabulary), Split::held_out};
}

struct Documents {
  std::vector<std::vector<std::int32_t>> ids;
  std::vector<std::vector<std::uint8_t>> keep;
};

Documents documents(std::size_t count, std::uint64_t longest) {
  Documents made;
  for (std::size_t i = 0; i < count; ++i) {
    const auto length = 1 + random_below(longest, 1, 0, i);
    std::vector<std::int32_t> ids;
    std::vector<std::uint8_t> keep;
    for (std::uint64_t t = 0; t < length; ++t) {
      ids.push_back(static_cast<std::int32_t>(random_below(kVocabulary, 2, i, t)));
      keep.push_back(static_cast<std::uint8_t>(random_below(2, 3, i, t)));
    }
    made.ids.push_back(std::move(ids));
    made.keep.push_back(std::move(keep));
  }
  return made;
}

void write(const Documents& made, const std::string& path) {
  TokenFileWriter writer(header());
  for (std::size_t i = 0; i < made.ids.size(); ++i) {
    writer.append(made.ids[i], made.keep[i]);
  }
  writer.write(path);
}

std::vector<std::int32_t> all_ids(const TokenFile& file) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(file.tokens()));
  file.read_ids(0, ids);
  return ids;
}

std::vector<std::int64_t> all_offsets(const TokenFile& file) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(file.documents()) + 1);
  file.read_offsets(0, offsets);
  return offsets;
}

std::vector<std::uint8_t> all_keep(const TokenFile& file) {
  std::vector<std::uint8_t> keep(static_cast<std::size_t>(file.tokens()));
  file.read_keep(0, keep);
  return keep;
}

// The text of the error that opening and reading the file throws; empty without one.
std::string fault(const std::string& path) {
  return test::error_of([&] {
    const TokenFile file(path);
    all_offsets(file);
    all_ids(file);
    all_keep(file);
  });
}

TEST(TokenFile, GivesBackEveryDocument) {
  const test::TemporaryDirectory directory;
  const Documents made = documents(300, 400);  // several chunks
  write(made, directory.path("a.h5"));
  const TokenFile file(directory.path("a.h5"));
  EXPECT_EQ(file.header().vocabulary, kVocabulary);
  EXPECT_EQ(file.header().vocabulary_hash, vocabulary_hash(kVocabulary));
  EXPECT_EQ(file.header().split, Split::held_out);
  ASSERT_EQ(file.documents(), 300);
  for (std::size_t i = 300; i-- > 0;) {
    std::array<std::int64_t, 2> offsets{};
    file.read_offsets(static_cast<std::int64_t>(i), offsets);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(offsets[1] - offsets[0]));
    std::vector<std::uint8_t> keep(ids.size());
    file.read_ids(offsets[0], ids);
    file.read_keep(offsets[0], keep);
    EXPECT_EQ(ids, made.ids[i]);
    EXPECT_EQ(keep, made.keep[i]);
  }
  EXPECT_FALSE(std::filesystem::exists(directory.path("a.h5.partial")));
}

TEST(TokenFile, ReadsAnyRange) {
  const test::TemporaryDirectory directory;
  write(documents(200, 400), directory.path("a.h5"));
  const TokenFile file(directory.path("a.h5"));
  const std::vector<std::int32_t> all = all_ids(file);
  for (const auto& [begin, count] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1}, {16380, 9}, {5, 20000}, {7, 0}}) {
    std::vector<std::int32_t> part(static_cast<std::size_t>(count));
    file.read_ids(begin, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), all.begin() + begin));
  }
}

TEST(TokenFile, BadDocumentsAreRefused) {
  TokenFileWriter writer(header());
  const std::vector<std::uint8_t> keep = {0, 1};
  EXPECT_THROW(writer.append({}, {}), Error);
  EXPECT_THROW(writer.append(std::vector<std::int32_t>{1, 1000}, keep), Error);
  EXPECT_THROW(writer.append(std::vector<std::int32_t>{-1, 1}, keep), Error);
  EXPECT_THROW(writer.append(std::vector<std::int32_t>{1}, keep), Error);
  EXPECT_THROW(writer.append(std::vector<std::int32_t>{1, 2}, std::vector<std::uint8_t>{0, 2}),
               Error);
  EXPECT_EQ(writer.documents(), 0);
}

TEST(TokenFile, CutFilesAreRefused) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("a.h5");
  write(documents(50, 400), path);
  const std::string bytes = read_file(path);
  for (const std::size_t size : {std::size_t{0}, bytes.size() / 2, bytes.size() - 1}) {
    write_file_atomically(path, bytes.substr(0, size));
    EXPECT_NE(fault(path).find("is no whole token shard"), std::string::npos) << size;
  }
  EXPECT_NE(fault(directory.path("none.h5")).find("no file"), std::string::npos);
}

TEST(TokenFile, FilesWithoutChecksummedMetadataAreRefused) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("old.h5");
  Hdf5Handle(BIFOCAL_HDF5(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT)),
             H5Fclose)
      .close();
  EXPECT_NE(fault(path).find("does not begin like an HDF5 file with checksums"), std::string::npos);
  write_file_atomically(path, "text");
  EXPECT_NE(fault(path).find("does not begin like an HDF5 file with checksums"), std::string::npos);
}

TEST(TokenFile, NoFlippedByteChangesWhatIsRead) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("a.h5");
  write(documents(6, 100), path);
  const std::string bytes = read_file(path);
  const std::vector<std::int32_t> ids = all_ids(TokenFile(path));
  const std::vector<std::uint8_t> keep = all_keep(TokenFile(path));
  const std::vector<std::int64_t> offsets = all_offsets(TokenFile(path));
  std::size_t noticed = 0;
  constexpr std::size_t kStride = 13;  // prime to 8: every bit of a byte gets its turn
  for (std::size_t i = 0; i < bytes.size(); i += kStride) {
    std::string flipped = bytes;
    flipped[i] = static_cast<char>(flipped[i] ^ (1 << (i % 8)));
    std::ofstream(path, std::ios::binary) << flipped;
    if (!fault(path).empty()) {
      ++noticed;
      continue;
    }
    const TokenFile file(path);  // a byte that nothing uses
    EXPECT_EQ(all_ids(file), ids) << "byte " << i;
    EXPECT_EQ(all_keep(file), keep) << "byte " << i;
    EXPECT_EQ(all_offsets(file), offsets) << "byte " << i;
  }
  EXPECT_GE(noticed, 5 * ids.size() / kStride);  // at least the bytes of ids and keep
}

// Replaces the offsets of a shard by others in one chunk, as shards of the first writer have them.
void rewrite_offsets(const std::string& path, const std::vector<std::int64_t>& offsets) {
  const Hdf5Handle file(BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT)), H5Fclose);
  BIFOCAL_HDF5(H5Ldelete(file.get(), "offsets", H5P_DEFAULT));
  const hsize_t extent = offsets.size();
  const Hdf5Handle space(BIFOCAL_HDF5(H5Screate_simple(1, &extent, nullptr)), H5Sclose);
  const Hdf5Handle properties(BIFOCAL_HDF5(H5Pcreate(H5P_DATASET_CREATE)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_chunk(properties.get(), 1, &extent));
  BIFOCAL_HDF5(H5Pset_fletcher32(properties.get()));
  const Hdf5Handle dataset(BIFOCAL_HDF5(H5Dcreate2(file.get(),
                                                   "offsets",
                                                   H5T_STD_I64LE,
                                                   space.get(),
                                                   H5P_DEFAULT,
                                                   properties.get(),
                                                   H5P_DEFAULT)),
                           H5Dclose);
  BIFOCAL_HDF5(
      H5Dwrite(dataset.get(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, offsets.data()));
}

TEST(TokenFile, OffsetsInLargeChunksAreRead) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("a.h5");
  write(documents(5000, 20), path);
  const std::vector<std::int64_t> offsets = all_offsets(TokenFile(path));
  rewrite_offsets(path, offsets);
  EXPECT_EQ(all_offsets(TokenFile(path)), offsets);
}

TEST(TokenFile, OffsetsThatDoNotGrowAreRefusedWhenTheyAreRead) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path("a.h5");
  write(documents(50, 20), path);
  const std::vector<std::int64_t> offsets = all_offsets(TokenFile(path));
  for (const auto& [entry, value] : std::vector<std::pair<std::size_t, std::int64_t>>{
           {7, offsets[6]}, {7, offsets.back() + 5}, {1, -3}}) {
    std::vector<std::int64_t> changed = offsets;
    changed[entry] = value;
    rewrite_offsets(path, changed);
    EXPECT_NE(fault(path).find("offsets should grow"), std::string::npos) << fault(path);
    const TokenFile file(path);
    std::array<std::int64_t, 3> part{};
    EXPECT_THROW(file.read_offsets(static_cast<std::int64_t>(entry) - 1, part), Error);
    file.read_offsets(20, part);
    EXPECT_EQ(part[1], offsets[21]);
  }
  for (const std::size_t entry : {std::size_t{0}, offsets.size() - 1}) {
    std::vector<std::int64_t> changed = offsets;
    ++changed[entry];
    rewrite_offsets(path, changed);
    EXPECT_NE(fault(path).find("is no whole token shard"), std::string::npos);
  }
}

TEST(TokenFile, SplitsByContentAtTheAskedShare) {
  int held_out = 0;
  for (std::int32_t i = 0; i < 4000; ++i) {
    const std::vector<std::int32_t> ids = {i, 1, 2};
    EXPECT_EQ(split_of(ids, 0.0), Split::train);
    EXPECT_EQ(split_of(ids, 1.0), Split::held_out);
    EXPECT_EQ(split_of(ids, 0.1), split_of(std::vector<std::int32_t>{i, 1, 2}, 0.1));
    held_out += split_of(ids, 0.1) == Split::held_out ? 1 : 0;
  }
  EXPECT_NEAR(held_out, 400, 76);  // 4 standard deviations of 19
}

TEST(TokenFile, VocabularyHashesTellWordsAndOrderApart) {
  const std::vector<std::string> words = {"a", "b"};
  EXPECT_EQ(vocabulary_hash(words),  // of "a\nb\n", from sha256sum
            "911169ddaaf146aff539f58c26c489af3b892dff0fe283c1c264c65ae5aa59a2");
  EXPECT_NE(vocabulary_hash(words), vocabulary_hash(std::vector<std::string>{"b", "a"}));
  EXPECT_NE(vocabulary_hash(2), vocabulary_hash(3));
}

}  // namespace
}  // namespace bifocal
