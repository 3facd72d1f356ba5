// Checkpoints of one rank: what comes back, what counts as complete, what damage is seen.
#include "checkpoint/checkpoint.h"

#include <gtest/gtest.h>

#include "checkpoint/manifest.h"
#include "checkpoint/single_rank_fixture.h"
#include "core/file.h"
#include "core/hdf5_handle.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

// The whole dataset as doubles, and its dims.
std::vector<double> read_view(const fs::path& path,
                              const std::string& name,
                              std::vector<hsize_t>& dims) {
  const Hdf5Handle file(BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)), H5Fclose);
  const Hdf5Handle dataset(BIFOCAL_HDF5(H5Dopen2(file.get(), name.c_str(), H5P_DEFAULT)), H5Dclose);
  const Hdf5Handle space(BIFOCAL_HDF5(H5Dget_space(dataset.get())), H5Sclose);
  dims.resize(static_cast<std::size_t>(H5Sget_simple_extent_ndims(space.get())));
  H5Sget_simple_extent_dims(space.get(), dims.data(), nullptr);
  std::vector<double> data(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space.get())));
  BIFOCAL_HDF5(
      H5Dread(dataset.get(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data()));
  return data;
}

}  // namespace

TEST_F(CheckpointTest, EveryElementComesBackUnderAnyCut) {
  for (const std::int64_t saved : {1000, 13, 4}) {
    save(saved, 5, saved);
    for (const std::int64_t loaded : {1000, 17, 3, 1}) {
      EXPECT_EQ(load(saved, 5, loaded), 0) << "saved by " << saved << ", loaded by " << loaded;
    }
  }
}

TEST_F(CheckpointTest, InfoComesBack) {
  save(12, 1);
  const CheckpointInfo info = read_checkpoint_info(path(12));
  const CheckpointInfo wanted = known_info(12);
  EXPECT_EQ(info.step, wanted.step);
  EXPECT_EQ(info.stage, wanted.stage);
  EXPECT_EQ(info.stage_step, wanted.stage_step);
  EXPECT_EQ(info.next_row, wanted.next_row);
  EXPECT_EQ(info.skipped, wanted.skipped);
  EXPECT_EQ(info.model_hash, wanted.model_hash);
  EXPECT_EQ(info.configuration, wanted.configuration);
  EXPECT_EQ(info.model_config, wanted.model_config);
}

TEST_F(CheckpointTest, BitsOfSpecialValuesComeBack) {
  std::vector<std::uint32_t> bits{0x7fc12345U, 0xff800000U, 0x80000000U, 0x00000001U, 0x7f7fffffU};
  std::vector<std::uint32_t> loaded(bits.size());
  std::vector<ShardedTensor> tensors{{"x", {5}, 0, 5, {bits.data(), DType::f32, {5}}}};
  save_checkpoint(directory(), known_info(1), tensors, {}, *own_group);
  tensors[0].data.data = loaded.data();
  load_checkpoint(path(1), tensors, *own_group);
  EXPECT_EQ(loaded, bits);
}

TEST_F(CheckpointTest, AWantedRangeMayBeAnyPartOfATensor) {
  save(3, 9, 6);
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    if (tensor.shape.size() > 9) {
      held.add_empty(tensor, 4, 9);
    }
  }
  load_checkpoint(path(3), held.tensors(), *own_group);
  EXPECT_EQ(held.wrong(9), 0);
}

TEST_F(CheckpointTest, ReadsFloat32AsFloat64AndBack) {
  save(3, 9, 6);
  Holdings held;
  for (KnownTensor tensor : known_tensors()) {
    tensor.dtype = tensor.dtype == DType::f32 ? DType::f64 : DType::f32;
    held.add_empty(tensor, 0, tensor.shape.size());
  }
  load_checkpoint(path(3), held.tensors(), *own_group);
  EXPECT_EQ(held.wrong(9), 0);
}

TEST_F(CheckpointTest, TensorsLongerThanAChunkComeBack) {
  const KnownTensor tensor{"long", DType::f32, {3, 900001}};
  Holdings held;
  held.add(tensor, 0, tensor.shape.size(), 2);
  save_checkpoint(directory(), known_info(1), held.tensors(), {}, *own_group);
  // Two chunks of half the tensor each, not two of the largest size.
  EXPECT_LT(fs::file_size(path(1) / "rank_00000.h5"), 10'900'000U);
  Holdings part;
  part.add_empty(tensor, 1200000, 1500000);
  load_checkpoint(path(1), part.tensors(), *own_group);
  EXPECT_EQ(part.wrong(2), 0);
}

TEST_F(CheckpointTest, TheNewestCompleteOneIsTheLatest) {
  EXPECT_EQ(latest_checkpoint(directory()), std::nullopt);
  EXPECT_EQ(latest_checkpoint(directory() / "absent"), std::nullopt);
  save(9, 1);
  save(10, 2);
  EXPECT_EQ(latest_checkpoint(directory()), path(10));
  EXPECT_EQ(read_file(directory() / "latest"), "step_10\n");

  fs::create_directory(path(11));  // no manifest
  fs::create_directory(path(12));
  overwrite(path(12) / kManifestName, "{}");
  fs::copy(path(10), directory() / "step_13.tmp");  // interrupted before its renaming
  fs::copy(path(10), directory() / "step_014");
  fs::copy(path(10), directory() / "step_15x");
  EXPECT_EQ(latest_checkpoint(directory()), path(10));

  const std::string manifest = read_file(path(10) / kManifestName);
  overwrite(path(10) / kManifestName, with_flip(manifest, manifest.size() / 2));
  EXPECT_EQ(latest_checkpoint(directory()), path(9));
}

TEST_F(CheckpointTest, ASaveRemovesInterruptedOnes) {
  save(1, 1);
  fs::create_directory(directory() / "step_7.tmp");
  fs::create_directory(directory() / "notes.tmp");
  overwrite(directory() / "step_7.tmp" / "rank_00000.h5", "half");
  save(2, 1);
  EXPECT_FALSE(fs::exists(directory() / "step_7.tmp"));
  EXPECT_TRUE(fs::exists(directory() / "notes.tmp"));
  EXPECT_EQ(load(1, 1), 0);
}

TEST_F(CheckpointTest, KeepsTheNewest) {
  for (const std::int64_t step : {1, 2, 3, 20}) {
    save(step, 1, 1000, {.newest = 2});
  }
  EXPECT_FALSE(fs::exists(path(1)));
  EXPECT_FALSE(fs::exists(path(2)));
  EXPECT_EQ(load(3, 1), 0);
  EXPECT_EQ(load(20, 1), 0);
  save(4, 6, 1000, {.newest = 1});  // an older step than one that is there
  EXPECT_EQ(load(4, 6), 0) << "the one just written was removed";
  EXPECT_FALSE(fs::exists(path(3)));
  EXPECT_TRUE(fs::exists(path(20)));
}

TEST_F(CheckpointTest, KeepsMultiplesBesideTheNewest) {
  for (const std::int64_t step : {10, 15, 20, 25, 30, 35}) {
    save(step, 1, 1000, {.newest = 1, .multiples_of = 20});
  }
  for (const std::int64_t step : {10, 15, 25, 30}) {
    EXPECT_FALSE(fs::exists(path(step))) << step;
  }
  EXPECT_EQ(load(20, 1), 0);
  EXPECT_EQ(load(35, 1), 0);
}

TEST_F(CheckpointTest, EqualStateHasEqualBytes) {
  save(1, 4);
  const std::string first = read_file(path(1) / "rank_00000.h5");
  save(1, 4);
  EXPECT_EQ(read_file(path(1) / "rank_00000.h5"), first);
}

TEST_F(CheckpointTest, ReplacesACompleteOneOfTheSameStep) {
  save(5, 1);
  save(5, 2);
  EXPECT_EQ(load(5, 2), 0);
  EXPECT_FALSE(fs::exists(directory() / "step_5.tmp"));
  overwrite(path(5) / kManifestName, "damaged");
  save(5, 3);
  EXPECT_EQ(load(5, 3), 0);
}

TEST_F(CheckpointTest, ANewerFormatIsRefusedByName) {
  save(1, 1);
  const fs::path file = path(1) / kManifestName;
  std::string text = read_file(file);
  const std::string field = "\"format_version\": 1";
  text.replace(text.find(field), field.size(), "\"format_version\": 2");
  overwrite(file, text);
  const std::string error = load_error(1);
  EXPECT_TRUE(contains(error, file.string()) && contains(error, "format version 1 or older, got 2"))
      << error;
  EXPECT_THROW(latest_checkpoint(directory()), NewerFormatError);
}

TEST_F(CheckpointTest, AnotherModelIsRefused) {
  save(1, 1);
  Holdings unknown;
  unknown.add_empty({"other", DType::f32, {2}}, 0, 2);
  EXPECT_THROW(load_checkpoint(path(1), unknown.tensors(), *own_group), Error);
  Holdings reshaped;
  reshaped.add_empty({"model.norm.weight", DType::f32, {1, 11}}, 0, 11);
  EXPECT_THROW(load_checkpoint(path(1), reshaped.tensors(), *own_group), Error);
  Holdings half;
  half.add_empty({"model.norm.weight", DType::f32, {11}}, 0, 11);
  half.tensors()[0].data.dtype = DType::bf16;
  EXPECT_THROW(load_checkpoint(path(1), half.tensors(), *own_group), Error);
}

TEST_F(CheckpointTest, TensorsThatCannotBeSavedLeaveEarlierOnesAlone) {
  save(1, 1);
  const KnownTensor tensor{"x", DType::f32, {4, 5}};
  const auto expect_refused = [&](Holdings& held, const char* reason) {
    const std::string error = save_error(2, held.tensors());
    EXPECT_TRUE(contains(error, reason)) << error;
    EXPECT_FALSE(fs::exists(path(2)));
    EXPECT_FALSE(fs::exists(directory() / "step_2.tmp"));
    EXPECT_EQ(load(1, 1), 0);
    EXPECT_EQ(read_file(directory() / "latest"), "step_1\n");
  };
  Holdings gap;
  gap.add(tensor, 0, 9, 1);
  gap.add(tensor, 10, 20, 1);
  expect_refused(gap, "element 9 is next");
  Holdings overlap;
  overlap.add(tensor, 0, 11, 1);
  overlap.add(tensor, 10, 20, 1);
  expect_refused(overlap, "element 11 is next");
  Holdings cut_short;
  cut_short.add(tensor, 0, 19, 1);
  expect_refused(cut_short, "only the first 19");
  Holdings outside;
  outside.add(tensor, 0, 21, 1);
  expect_refused(outside, "[0, 21)");
  Holdings slash;
  slash.add({"a/b", DType::f32, {2}}, 0, 2, 1);
  expect_refused(slash, "a/b");
  Holdings half;
  half.add({"x", DType::f32, {2}}, 0, 2, 1);
  half.tensors()[0].data.dtype = DType::bf16;
  expect_refused(half, "bfloat16");
  Holdings no_text;
  no_text.add({"\xff", DType::f32, {2}}, 0, 2, 1);
  expect_refused(no_text, "UTF-8");
}

TEST_F(CheckpointTest, TheViewShowsWholeTensorsInTheirShapes) {
  for (const std::int64_t stride : {1000, 13, 1}) {
    save(stride, 4, stride);
    for (const KnownTensor& tensor : known_tensors()) {
      std::vector<hsize_t> dims;
      const auto data = read_view(path(stride) / "checkpoint.h5", tensor.name, dims);
      std::vector<hsize_t> wanted_dims{1};  // of a scalar
      if (tensor.shape.rank() > 0) {
        const std::vector<std::int64_t> shape = dims_of(tensor.shape);
        wanted_dims.assign(shape.begin(), shape.end());
      }
      EXPECT_EQ(dims, wanted_dims) << tensor.name;
      for (std::size_t i = 0; i < data.size(); ++i) {
        ASSERT_EQ(data[i], known_value(tensor.name, static_cast<std::int64_t>(i), 4))
            << tensor.name << " " << i << ", stride " << stride;
      }
    }
  }
}

TEST_F(CheckpointTest, TheViewShowsNanWhereAFileIsMissing) {
  save(1, 4);
  fs::remove(path(1) / "rank_00000.h5");
  std::vector<hsize_t> dims;
  for (const char* name : {"model.norm.weight", "moments.four.dims"}) {
    for (const double x : read_view(path(1) / "checkpoint.h5", name, dims)) {
      EXPECT_TRUE(std::isnan(x));
    }
  }
}

TEST(CheckpointFixture, AVersion1CheckpointOfTwoRanksIsRead) {
  const fs::path path = fs::path(BIFOCAL_SOURCE_DIR) / "tests/checkpoint/version_1/step_7";
  const CheckpointInfo info = read_checkpoint_info(path);
  EXPECT_EQ(info.step, 7);
  EXPECT_EQ(info.configuration, known_info(7).configuration);
  EXPECT_EQ(info.skipped, 0);  // it was written before there was such a count
  EXPECT_EQ(read_manifest(path).ranks, 2);
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    held.add_empty(tensor, 0, tensor.shape.size());
  }
  load_checkpoint(path, held.tensors(), *make_self_communicator());
  EXPECT_EQ(held.wrong(7), 0);
}

}  // namespace bifocal
