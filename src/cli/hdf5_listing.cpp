// What lies in any HDF5 file.
#include "cli/hdf5_listing.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

namespace bifocal {

namespace {

// Called by the C library, through which no exception may pass: it only notes names.
herr_t note_dataset(hid_t, const char* name, const H5O_info_t* info, void* names) {
  if (info->type == H5O_TYPE_DATASET) {
    static_cast<std::vector<std::string>*>(names)->emplace_back(name);
  }
  return 0;
}

std::string type_text(hid_t type) {
  const std::size_t bits = 8 * H5Tget_size(type);
  switch (H5Tget_class(type)) {
    case H5T_FLOAT:
      return fmt::format("float{}", bits);
    case H5T_INTEGER:
      return fmt::format("{}int{}", H5Tget_sign(type) == H5T_SGN_NONE ? "u" : "", bits);
    case H5T_STRING:
      return "string";
    default:
      return "other";
  }
}

bool is_number(hid_t type) {
  return H5Tget_class(type) == H5T_FLOAT || H5Tget_class(type) == H5T_INTEGER;
}

std::string read_text(hid_t attribute, hid_t type) {
  if (H5Tis_variable_str(type) > 0) {
    const Hdf5Handle memory_type(BIFOCAL_HDF5(H5Tcopy(H5T_C_S1)), H5Tclose);
    BIFOCAL_HDF5(H5Tset_size(memory_type.get(), H5T_VARIABLE));
    BIFOCAL_HDF5(H5Tset_cset(memory_type.get(), H5Tget_cset(type)));
    char* text = nullptr;
    BIFOCAL_HDF5(H5Aread(attribute, memory_type.get(), static_cast<void*>(&text)));
    std::string copy = text == nullptr ? "" : text;
    H5free_memory(text);
    return copy;
  }
  std::string text(H5Tget_size(type), '\0');
  BIFOCAL_HDF5(H5Aread(attribute, type, text.data()));
  return text.substr(0, text.find('\0'));
}

// Nothing for arrays and other types.
std::string attribute_text(hid_t attribute) {
  const Hdf5Handle type(BIFOCAL_HDF5(H5Aget_type(attribute)), H5Tclose);
  const Hdf5Handle space(BIFOCAL_HDF5(H5Aget_space(attribute)), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != 1) {
    return {};
  }
  switch (H5Tget_class(type.get())) {
    case H5T_STRING:
      return read_text(attribute, type.get());
    case H5T_INTEGER: {
      std::int64_t value = 0;
      BIFOCAL_HDF5(H5Aread(attribute, H5T_NATIVE_INT64, &value));
      return std::to_string(value);
    }
    case H5T_FLOAT: {
      double value = 0.0;
      BIFOCAL_HDF5(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value));
      return fmt::format("{}", value);
    }
    default:
      return {};
  }
}

}  // namespace

Hdf5Listing::Hdf5Listing(const std::filesystem::path& path) {
  silence_hdf5();
  BIFOCAL_REQUIRE(H5Fis_hdf5(path.c_str()) > 0,
                  "[inspect] {} is neither a safetensors nor an HDF5 file",
                  path.string());
  file_ = Hdf5Handle(BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)), H5Fclose);
}

std::vector<Hdf5Dataset> Hdf5Listing::datasets() const {
  std::vector<std::string> names;
  BIFOCAL_HDF5(
      H5Ovisit2(file_.get(), H5_INDEX_NAME, H5_ITER_NATIVE, note_dataset, &names, H5O_INFO_BASIC));
  std::sort(names.begin(), names.end());
  std::vector<Hdf5Dataset> all;
  for (const std::string& name : names) {
    const Hdf5Handle set(BIFOCAL_HDF5(H5Dopen2(file_.get(), name.c_str(), H5P_DEFAULT)), H5Dclose);
    const Hdf5Handle type(BIFOCAL_HDF5(H5Dget_type(set.get())), H5Tclose);
    const Hdf5Handle space(BIFOCAL_HDF5(H5Dget_space(set.get())), H5Sclose);
    std::array<hsize_t, H5S_MAX_RANK> dims{};
    const int rank = BIFOCAL_HDF5(H5Sget_simple_extent_dims(space.get(), dims.data(), nullptr));
    all.push_back(
        {name, type_text(type.get()), {dims.begin(), dims.begin() + rank}, is_number(type.get())});
  }
  return all;
}

std::vector<std::pair<std::string, std::string>> Hdf5Listing::attributes() const {
  std::vector<std::pair<std::string, std::string>> all;
  H5O_info_t info;
  BIFOCAL_HDF5(H5Oget_info2(file_.get(), &info, H5O_INFO_NUM_ATTRS));
  for (hsize_t i = 0; i < info.num_attrs; ++i) {
    const Hdf5Handle attribute(
        BIFOCAL_HDF5(H5Aopen_by_idx(
            file_.get(), ".", H5_INDEX_NAME, H5_ITER_INC, i, H5P_DEFAULT, H5P_DEFAULT)),
        H5Aclose);
    const auto length =
        static_cast<std::size_t>(BIFOCAL_HDF5(H5Aget_name(attribute.get(), 0, nullptr)));
    std::string name(length + 1, '\0');
    BIFOCAL_HDF5(H5Aget_name(attribute.get(), name.size(), name.data()));
    name.resize(length);
    all.emplace_back(name, attribute_text(attribute.get()));
  }
  return all;
}

void Hdf5Listing::read(const Hdf5Dataset& dataset,
                       const std::function<void(const ConstTensorView&)>& visit) const {
  const Hdf5Handle set(BIFOCAL_HDF5(H5Dopen2(file_.get(), dataset.name.c_str(), H5P_DEFAULT)),
                       H5Dclose);
  if (dataset.shape.empty()) {
    double value = 0.0;
    BIFOCAL_HDF5(H5Dread(set.get(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, &value));
    visit({&value, DType::f64, {1}});
    return;
  }
  // Outermost indices at a time, about a million elements.
  constexpr std::int64_t kPiece = 1 << 20;
  std::int64_t row = 1;
  for (std::size_t dim = 1; dim < dataset.shape.size(); ++dim) {
    row *= dataset.shape[dim];
  }
  const std::int64_t rows = std::max<std::int64_t>(1, kPiece / std::max<std::int64_t>(1, row));
  const Hdf5Handle space(BIFOCAL_HDF5(H5Dget_space(set.get())), H5Sclose);
  std::vector<hsize_t> start(dataset.shape.size(), 0);
  std::vector<hsize_t> count(dataset.shape.begin(), dataset.shape.end());
  std::vector<double> elements;
  for (std::int64_t begin = 0; row > 0 && begin < dataset.shape[0]; begin += rows) {
    const std::int64_t taken = std::min(rows, dataset.shape[0] - begin);
    start[0] = static_cast<hsize_t>(begin);
    count[0] = static_cast<hsize_t>(taken);
    elements.resize(static_cast<std::size_t>(taken * row));
    BIFOCAL_HDF5(H5Sselect_hyperslab(
        space.get(), H5S_SELECT_SET, start.data(), nullptr, count.data(), nullptr));
    const hsize_t size = elements.size();
    const Hdf5Handle memory(BIFOCAL_HDF5(H5Screate_simple(1, &size, nullptr)), H5Sclose);
    BIFOCAL_HDF5(H5Dread(
        set.get(), H5T_NATIVE_DOUBLE, memory.get(), space.get(), H5P_DEFAULT, elements.data()));
    visit({elements.data(), DType::f64, {taken * row}});
  }
}

}  // namespace bifocal
