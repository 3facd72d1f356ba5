// What is said of damaged, cut and missing files: the file, and the dataset where the damage lies.
#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "checkpoint/single_rank_fixture.h"
#include "core/file.h"
#include "support/error_of.h"

namespace bifocal {

namespace {

constexpr std::size_t kFletcher32Bytes = 4;

// A range of a saved tensor and the bytes of its file that hold it, found by their values.
struct Place {
  std::string named;  // as an error's text names it
  std::size_t begin = 0;
  std::size_t end = 0;
};

std::string_view bytes_of(const ShardedTensor& tensor) {
  return {static_cast<const char*>(tensor.data.data), tensor.data.bytes()};
}

std::vector<Place> places_of(const Holdings& held, const std::string& bytes) {
  std::vector<Place> places;
  for (const ShardedTensor& tensor : held.tensors()) {
    if (tensor.data.size() == 0) {
      continue;
    }
    const std::string_view values = bytes_of(tensor);
    const std::size_t at = bytes.find(values);
    EXPECT_TRUE(at != std::string::npos && bytes.find(values, at + 1) == std::string::npos)
        << tensor.name;
    places.push_back({fmt::format("the damage lies in dataset /tensors/{}/{}, in elements {} to "
                                  "{} of the tensor",
                                  tensor.name,
                                  tensor.begin,
                                  tensor.begin,
                                  tensor.end - 1),
                      at,
                      at + values.size() + kFletcher32Bytes});
  }
  return places;
}

// What the error must say of a flipped byte there.
std::string wanted_text(const std::vector<Place>& places, std::size_t at) {
  for (const Place& place : places) {
    if (place.begin <= at && at < place.end) {
      return place.named + ": use";
    }
  }
  return "the damage lies in the file's structure, every dataset is whole";
}

}  // namespace

class CheckpointDamage : public CheckpointTest {};

TEST_F(CheckpointDamage, AFlippedByteAnywhereInAFileNamesTheFileAndTheDataset) {
  Holdings held = cut(9, [](Holdings& to, const KnownTensor& tensor, auto begin, auto end) {
    to.add(tensor, begin, end, 1);
  });
  save_checkpoint(directory(), known_info(1), held.tensors(), {}, *own_group);
  const fs::path file = path(1) / "rank_00000.h5";
  const std::string bytes = read_file(file);
  const std::vector<Place> places = places_of(held, bytes);
  std::vector<std::size_t> flips;
  for (std::size_t at = 0; at < bytes.size(); at += 97) {
    flips.push_back(at);
  }
  for (const Place& place : places) {
    flips.insert(flips.end(), {place.begin - 1, place.begin, place.end - 1, place.end});
  }
  std::size_t in_datasets = 0;
  for (const std::size_t at : flips) {
    const std::string wanted = wanted_text(places, at);
    in_datasets += contains(wanted, "/tensors/") ? 1 : 0;
    overwrite(file, with_flip(bytes, at));
    const std::string error = load_error(1);
    ASSERT_TRUE(contains(error, file.string()) && contains(error, "SHA-256") &&
                contains(error, wanted))
        << at << ": wanted " << wanted << ", got " << error;
  }
  EXPECT_GE(in_datasets, 2 * places.size());
  EXPECT_LT(in_datasets, flips.size() - 2 * places.size());
  overwrite(file, bytes);
  EXPECT_EQ(load_error(1), "");
}

TEST_F(CheckpointDamage, AChunkOfALongDatasetIsNamedByItsElements) {
  const KnownTensor tensor{"long", DType::f32, {3, 900001}};  // two chunks
  Holdings held;
  held.add(tensor, 0, tensor.shape.size(), 2);
  save_checkpoint(directory(), known_info(1), held.tensors(), {}, *own_group);
  const fs::path file = path(1) / "rank_00000.h5";
  const std::string bytes = read_file(file);
  const std::string_view values = bytes_of(held.tensors()[0]);
  const auto error_of_loading = [&](const std::string& damaged) {
    overwrite(file, damaged);
    return test::error_of([&] { load_checkpoint(path(1), held.tensors(), *own_group); });
  };
  const std::size_t first = bytes.find(values.substr(4 * 10, 64));
  const std::size_t second = bytes.find(values.substr(4 * 2000000, 64));
  ASSERT_TRUE(first != std::string::npos && second != std::string::npos);
  EXPECT_TRUE(contains(error_of_loading(with_flip(bytes, first)),
                       "dataset /tensors/long/0, in elements 0 to 1350001 of the tensor: use"));
  EXPECT_TRUE(contains(error_of_loading(with_flip(bytes, second)),
                       "dataset /tensors/long/0, in elements 1350002 to 2700002 of the tensor: "
                       "use"));
  EXPECT_TRUE(contains(error_of_loading(with_flip(with_flip(bytes, second), first)),
                       "in elements 0 to 1350001 of the tensor, and in 1 other chunk: use"));
  EXPECT_TRUE(
      contains(error_of_loading(bytes.substr(0, second)), "in elements 1350002 to 2700002"));
  EXPECT_EQ(error_of_loading(bytes), "");
}

TEST_F(CheckpointDamage, AFlippedByteAnywhereInTheManifestNamesIt) {
  save(1, 1);
  const fs::path file = path(1) / kManifestName;
  const std::string text = read_file(file);
  for (std::size_t at = 0; at < text.size(); ++at) {
    try {
      parse_manifest(with_flip(text, at), file);
      ADD_FAILURE() << "byte " << at;
    } catch (const Error& error) {
      ASSERT_TRUE(contains(error.what(), file.string())) << error.what();
    }
  }
  overwrite(file, with_flip(text, text.size() / 2));
  EXPECT_TRUE(contains(load_error(1), file.string()));
}

TEST_F(CheckpointDamage, TruncatedLongerAndMissingFilesAreNamed) {
  save(1, 1);
  for (const char* name : {"rank_00000.h5", kManifestName}) {
    const fs::path file = path(1) / name;
    const std::string bytes = read_file(file);
    for (const std::string& damaged :
         {bytes.substr(0, bytes.size() - 1), std::string(), bytes + "x"}) {
      overwrite(file, damaged);
      EXPECT_TRUE(contains(load_error(1), file.string())) << load_error(1);
    }
    fs::remove(file);
    EXPECT_TRUE(contains(load_error(1), file.string())) << load_error(1);
    overwrite(file, bytes);
    EXPECT_EQ(load_error(1), "");
  }
  EXPECT_TRUE(contains(load_error(2), "step_2"));
}

TEST_F(CheckpointDamage, AManifestThatKnowsNoChunksNamesTheFileAlone) {
  save(1, 1);
  const fs::path file = path(1) / "rank_00000.h5";
  Manifest manifest = read_manifest(path(1));
  for (ManifestTensor& tensor : manifest.tensors) {
    for (TensorPart& part : tensor.parts) {
      part.chunks.clear();
    }
  }
  overwrite(path(1) / kManifestName, to_text(manifest));
  EXPECT_EQ(load_error(1), "");
  const std::string bytes = read_file(file);
  overwrite(file, with_flip(bytes, bytes.size() / 2));
  const std::string error = load_error(1);
  EXPECT_TRUE(contains(error, file.string()) && !contains(error, "the damage lies")) << error;
}

}  // namespace bifocal
