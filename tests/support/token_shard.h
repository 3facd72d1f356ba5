// Documents of a token shard, read with nothing but the HDF5 library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <hdf5.h>

#include "core/hdf5_handle.h"

namespace bifocal::test {

struct StoredDocument {
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> keep;

  bool operator==(const StoredDocument&) const = default;
};

template <class T>
std::vector<T> read_whole_dataset(hid_t file, const char* name, hid_t type) {
  const Hdf5Handle dataset(BIFOCAL_HDF5(H5Dopen2(file, name, H5P_DEFAULT)), H5Dclose);
  const Hdf5Handle space(BIFOCAL_HDF5(H5Dget_space(dataset.get())), H5Sclose);
  std::vector<T> values(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space.get())));
  BIFOCAL_HDF5(H5Dread(dataset.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
  return values;
}

inline std::vector<StoredDocument> read_token_shard(const std::string& path) {
  const Hdf5Handle file(BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)), H5Fclose);
  const auto offsets = read_whole_dataset<std::int64_t>(file.get(), "offsets", H5T_NATIVE_INT64);
  const auto ids = read_whole_dataset<std::int32_t>(file.get(), "ids", H5T_NATIVE_INT32);
  const auto keep = read_whole_dataset<std::uint8_t>(file.get(), "keep", H5T_NATIVE_UINT8);
  std::vector<StoredDocument> documents;
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    documents.push_back({{ids.begin() + offsets[i], ids.begin() + offsets[i + 1]},
                         {keep.begin() + offsets[i], keep.begin() + offsets[i + 1]}});
  }
  return documents;
}

}  // namespace bifocal::test
