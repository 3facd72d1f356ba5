// Reading and writing of a checkpoint's HDF5 files.
#include "checkpoint/hdf5_file.h"

#include <algorithm>
#include <array>
#include <limits>

#include "checkpoint/background_task.h"
#include "core/file.h"

namespace bifocal {

namespace {

// A file that could not be closed for lack of space stays half open inside the library, whose
// clean-up at exit then crashes. All our handles are closed by then, so there is nothing to clean
// up. Must come before any other call of the library, hence before main.
const herr_t kNoCleanUpAtExit = H5dont_atexit();

constexpr std::int64_t kMaxChunkBytes = 10'000'000;

// Chunks of a node of a dataset's index, halved. The library's 32 take 2 KB, and most datasets have
// one chunk.
constexpr unsigned kIndexNodeHalf = 4;

hid_t memory_type(DType dtype) {
  return dtype == DType::f64 ? H5T_NATIVE_DOUBLE : H5T_NATIVE_FLOAT;
}

hid_t file_type(DType dtype) {
  return dtype == DType::f64 ? H5T_IEEE_F64LE : H5T_IEEE_F32LE;
}

// Access without file locks, which parallel file systems often lack.
Hdf5Handle file_access(H5F_libver_t newest) {
  Hdf5Handle access(BIFOCAL_HDF5(H5Pcreate(H5P_FILE_ACCESS)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_libver_bounds(access.get(), H5F_LIBVER_EARLIEST, newest));
  BIFOCAL_HDF5(H5Pset_file_locking(access.get(), false, true));
  return access;
}

// `newest`: the oldest library generation that must be able to read the file.
Hdf5Handle create_file(const std::filesystem::path& path, H5F_libver_t newest) {
  const Hdf5Handle access = file_access(newest);
  const Hdf5Handle creation(BIFOCAL_HDF5(H5Pcreate(H5P_FILE_CREATE)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_istore_k(creation.get(), kIndexNodeHalf));
  return {BIFOCAL_HDF5(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get())),
          H5Fclose};
}

Hdf5Handle flat_space(std::int64_t n) {
  const auto size = static_cast<hsize_t>(n);
  return {BIFOCAL_HDF5(H5Screate_simple(1, &size, nullptr)), H5Sclose};
}

void write_attribute(hid_t object, const char* name, const std::vector<std::int64_t>& values) {
  const Hdf5Handle space = flat_space(static_cast<std::int64_t>(values.size()));
  const Hdf5Handle attribute(
      BIFOCAL_HDF5(H5Acreate2(object, name, H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT)),
      H5Aclose);
  if (!values.empty()) {
    BIFOCAL_HDF5(H5Awrite(attribute.get(), H5T_NATIVE_INT64, values.data()));
  }
}

void write_attribute(hid_t object, const char* name, std::int64_t value) {
  const Hdf5Handle space(BIFOCAL_HDF5(H5Screate(H5S_SCALAR)), H5Sclose);
  const Hdf5Handle attribute(
      BIFOCAL_HDF5(H5Acreate2(object, name, H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT)),
      H5Aclose);
  BIFOCAL_HDF5(H5Awrite(attribute.get(), H5T_NATIVE_INT64, &value));
}

// Elements [begin, begin + n) of a range, whose dataset it is.
void write_piece(hid_t dataset, const ShardedTensor& tensor, std::int64_t begin, std::int64_t n) {
  const TensorView flat = tensor.data.reshape({tensor.data.size()});
  const Hdf5Handle stored(BIFOCAL_HDF5(H5Dget_space(dataset)), H5Sclose);
  const Hdf5Handle held = flat_space(n);
  const auto offset = static_cast<hsize_t>(begin);
  const auto size = static_cast<hsize_t>(n);
  BIFOCAL_HDF5(H5Sselect_hyperslab(stored.get(), H5S_SELECT_SET, &offset, nullptr, &size, nullptr));
  BIFOCAL_HDF5(H5Dwrite(dataset,
                        memory_type(flat.dtype),
                        held.get(),
                        stored.get(),
                        H5P_DEFAULT,
                        flat.rows(begin, begin + n).data));
}

StoredChunk place_of_chunk(hid_t dataset, std::int64_t begin) {
  const auto first = static_cast<hsize_t>(begin);
  haddr_t offset = 0;
  hsize_t bytes = 0;
  BIFOCAL_HDF5(H5Dget_chunk_info_by_coord(dataset, &first, nullptr, &offset, &bytes));
  return {.offset = static_cast<std::int64_t>(offset), .bytes = static_cast<std::int64_t>(bytes)};
}

StoredRange write_dataset(hid_t file, const ShardedTensor& tensor, const std::stop_token& stop) {
  StoredRange stored{.name = tensor.name, .begin = tensor.begin};
  const std::int64_t n = tensor.end - tensor.begin;
  // Chunks of equal size, since the last one is stored whole even if it holds little.
  const std::int64_t most = kMaxChunkBytes / static_cast<std::int64_t>(size_of(tensor.data.dtype));
  const std::int64_t num_chunks = (n + most - 1) / most;
  const std::int64_t chunk = (n + num_chunks - 1) / num_chunks;
  const auto chunk_size = static_cast<hsize_t>(chunk);
  const Hdf5Handle creation(BIFOCAL_HDF5(H5Pcreate(H5P_DATASET_CREATE)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_chunk(creation.get(), 1, &chunk_size));
  BIFOCAL_HDF5(H5Pset_fletcher32(creation.get()));
  BIFOCAL_HDF5(H5Pset_fill_time(creation.get(), H5D_FILL_TIME_NEVER));
  BIFOCAL_HDF5(H5Pset_obj_track_times(creation.get(), false));  // equal state, equal bytes
  const Hdf5Handle links(BIFOCAL_HDF5(H5Pcreate(H5P_LINK_CREATE)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_create_intermediate_group(links.get(), 1));
  const Hdf5Handle space = flat_space(n);
  Hdf5Handle dataset(BIFOCAL_HDF5(H5Dcreate2(file,
                                             dataset_path(tensor.name, tensor.begin).c_str(),
                                             file_type(tensor.data.dtype),
                                             space.get(),
                                             links.get(),
                                             creation.get(),
                                             H5P_DEFAULT)),
                     H5Dclose);
  write_attribute(dataset.get(), "shape", dims_of(tensor.global));
  write_attribute(dataset.get(), "begin", tensor.begin);
  write_attribute(dataset.get(), "end", tensor.end);
  for (std::int64_t begin = 0; begin < n; begin += chunk) {
    require_no_stop(stop);
    write_piece(dataset.get(), tensor, begin, std::min(chunk, n - begin));
    stored.chunks.push_back(place_of_chunk(dataset.get(), begin));
  }
  dataset.close();
  return stored;
}

// A box of a tensor: indices start to start + count of each dim. Its elements are contiguous when
// flattened and begin at `flat`.
struct Box {
  std::array<hsize_t, Shape::kMaxRank> start{};
  std::array<hsize_t, Shape::kMaxRank> count{};
  std::int64_t flat = 0;
  std::int64_t size = 0;
};

// Cuts flat elements [begin, end) of a shape, dims `dim` and inner free, into boxes: the rest of a
// first row, whole rows, the start of a last row, and so on inwards.
void cut_into_boxes(const Shape& shape,
                    int dim,
                    std::int64_t begin,
                    std::int64_t end,
                    Box outer,
                    std::vector<Box>& boxes) {
  if (begin == end) {
    return;
  }
  std::int64_t row = 1;
  for (int inner = dim + 1; inner < shape.rank(); ++inner) {
    row *= shape[inner];
  }
  const auto at = static_cast<std::size_t>(dim);
  const auto descend = [&](std::int64_t index, std::int64_t from, std::int64_t to) {
    Box box = outer;
    box.start.at(at) = static_cast<hsize_t>(index);
    box.count.at(at) = 1;
    box.flat += index * row;
    cut_into_boxes(shape, dim + 1, from - index * row, to - index * row, box, boxes);
  };
  std::int64_t first = begin / row;
  const std::int64_t last = end / row;
  if (begin % row != 0) {
    descend(first, begin, std::min(end, (first + 1) * row));
    ++first;
  }
  if (first < last) {
    Box box = outer;
    box.start.at(at) = static_cast<hsize_t>(first);
    box.count.at(at) = static_cast<hsize_t>(last - first);
    box.flat += first * row;
    box.size = (last - first) * row;
    for (int inner = dim + 1; inner < shape.rank(); ++inner) {
      box.count.at(static_cast<std::size_t>(inner)) = static_cast<hsize_t>(shape[inner]);
    }
    boxes.push_back(box);
  }
  if (end % row != 0 && first <= last) {
    descend(last, last * row, end);
  }
}

template <class T>
void set_nan_fill(hid_t creation, hid_t type) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  BIFOCAL_HDF5(H5Pset_fill_value(creation, type, &nan));
}

void write_view(hid_t file, const Manifest& manifest, const ManifestTensor& tensor) {
  // A scalar is shown as one element, since a mapping needs a dimension.
  const Shape shape = tensor.shape.rank() == 0 ? Shape{1} : tensor.shape;
  std::array<hsize_t, Shape::kMaxRank> dims{};
  for (int dim = 0; dim < shape.rank(); ++dim) {
    dims.at(static_cast<std::size_t>(dim)) = static_cast<hsize_t>(shape[dim]);
  }
  const Hdf5Handle whole(BIFOCAL_HDF5(H5Screate_simple(shape.rank(), dims.data(), nullptr)),
                         H5Sclose);
  const Hdf5Handle creation(BIFOCAL_HDF5(H5Pcreate(H5P_DATASET_CREATE)), H5Pclose);
  if (tensor.dtype == DType::f64) {
    set_nan_fill<double>(creation.get(), H5T_NATIVE_DOUBLE);
  } else {
    set_nan_fill<float>(creation.get(), H5T_NATIVE_FLOAT);
  }
  for (const TensorPart& part : tensor.parts) {
    const Hdf5Handle source = flat_space(part.end - part.begin);
    std::vector<Box> boxes;
    cut_into_boxes(shape, 0, part.begin, part.end, {}, boxes);
    for (const Box& box : boxes) {
      const auto offset = static_cast<hsize_t>(box.flat - part.begin);
      const auto size = static_cast<hsize_t>(box.size);
      BIFOCAL_HDF5(
          H5Sselect_hyperslab(source.get(), H5S_SELECT_SET, &offset, nullptr, &size, nullptr));
      BIFOCAL_HDF5(H5Sselect_hyperslab(
          whole.get(), H5S_SELECT_SET, box.start.data(), nullptr, box.count.data(), nullptr));
      BIFOCAL_HDF5(H5Pset_virtual(creation.get(),
                                  whole.get(),
                                  manifest.files[static_cast<std::size_t>(part.file)].name.c_str(),
                                  dataset_path(tensor.name, part.begin).c_str(),
                                  source.get()));
    }
  }
  BIFOCAL_HDF5(H5Sselect_all(whole.get()));
  Hdf5Handle dataset(BIFOCAL_HDF5(H5Dcreate2(file,
                                             tensor.name.c_str(),
                                             file_type(tensor.dtype),
                                             whole.get(),
                                             H5P_DEFAULT,
                                             creation.get(),
                                             H5P_DEFAULT)),
                     H5Dclose);
  dataset.close();
}

std::vector<StoredRange> write_ranges(const std::filesystem::path& path,
                                      std::int64_t step,
                                      int rank,
                                      const std::vector<ShardedTensor>& tensors,
                                      const std::stop_token& stop) {
  std::vector<StoredRange> stored;
  Hdf5Handle file = create_file(path, H5F_LIBVER_V18);
  write_attribute(file.get(), "format_version", kCheckpointFormatVersion);
  write_attribute(file.get(), "step", step);
  write_attribute(file.get(), "rank", rank);
  for (const ShardedTensor& tensor : tensors) {
    if (tensor.end > tensor.begin) {
      stored.push_back(write_dataset(file.get(), tensor, stop));
    }
  }
  file.close();
  return stored;
}

}  // namespace

std::string dataset_path(const std::string& name, std::int64_t begin) {
  return fmt::format("/tensors/{}/{}", name, begin);
}

std::vector<StoredRange> write_rank_file(const std::filesystem::path& path,
                                         std::int64_t step,
                                         int rank,
                                         const std::vector<ShardedTensor>& tensors,
                                         const std::stop_token& stop) {
  std::vector<StoredRange> stored;
  try {
    stored = write_ranges(path, step, rank, tensors, stop);
  } catch (const Error&) {
    // The library may keep the file open, so its space is not freed by removing it.
    std::error_code ignored;
    std::filesystem::resize_file(path, 0, ignored);
    throw;
  }
  fsync_file(path);
  return stored;
}

void write_view_file(const std::filesystem::path& path, const Manifest& manifest) {
  Hdf5Handle file = create_file(path, H5F_LIBVER_V110);
  write_attribute(file.get(), "format_version", kCheckpointFormatVersion);
  write_attribute(file.get(), "step", manifest.info.step);
  for (const ManifestTensor& tensor : manifest.tensors) {
    write_view(file.get(), manifest, tensor);
  }
  file.close();
  fsync_file(path);
}

RankFile::RankFile(const std::filesystem::path& path) {
  const Hdf5Handle access = file_access(H5F_LIBVER_LATEST);
  file_ = {BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get())), H5Fclose};
}

void RankFile::read(const std::string& name,
                    std::int64_t part_begin,
                    std::int64_t begin,
                    const TensorView& target) const {
  const std::string path = dataset_path(name, part_begin);
  const Hdf5Handle dataset(BIFOCAL_HDF5(H5Dopen2(file_.get(), path.c_str(), H5P_DEFAULT)),
                           H5Dclose);
  const Hdf5Handle stored(BIFOCAL_HDF5(H5Dget_space(dataset.get())), H5Sclose);
  const Hdf5Handle held = flat_space(target.size());
  const auto offset = static_cast<hsize_t>(begin - part_begin);
  const auto size = static_cast<hsize_t>(target.size());
  BIFOCAL_HDF5(H5Sselect_hyperslab(stored.get(), H5S_SELECT_SET, &offset, nullptr, &size, nullptr));
  BIFOCAL_HDF5(H5Dread(dataset.get(),
                       memory_type(target.dtype),
                       held.get(),
                       stored.get(),
                       H5P_DEFAULT,
                       target.data));
}

}  // namespace bifocal
