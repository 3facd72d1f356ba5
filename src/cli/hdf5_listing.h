// What lies in any HDF5 file.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/hdf5_handle.h"
#include "core/tensor.h"

namespace bifocal {

struct Hdf5Dataset {
  std::string name;
  std::string type;  // "float32", "int64", "string", ...
  std::vector<std::int64_t> shape;
  bool is_number = false;
};

// A file of any content, open for reading. Throws Error for what is no HDF5 file.
class Hdf5Listing {
 public:
  explicit Hdf5Listing(const std::filesystem::path& path);

  // All datasets, by name.
  std::vector<Hdf5Dataset> datasets() const;

  // Name and value of the root's attributes that are one number or one text.
  std::vector<std::pair<std::string, std::string>> attributes() const;

  // Calls `visit` with pieces of a dataset of numbers as float64, in order.
  void read(const Hdf5Dataset& dataset,
            const std::function<void(const ConstTensorView&)>& visit) const;

 private:
  Hdf5Handle file_;
};

}  // namespace bifocal
