// Reading golden files.
#include "support/golden.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "core/hdf5_handle.h"

namespace bifocal::test {

namespace fs = std::filesystem;

namespace {

const fs::path kCommitted = fs::path(BIFOCAL_SOURCE_DIR) / "tests" / "golden";

fs::path chosen_set() {
  const char* directory = std::getenv("BIFOCAL_GOLDEN_DIR");
  return directory != nullptr && *directory != '\0' ? fs::path(directory) : kCommitted;
}

template <class Accept>
std::vector<fs::path> find(const Accept& accept) {
  for (const fs::path& set : {chosen_set(), kCommitted}) {
    std::vector<fs::path> found;
    BIFOCAL_REQUIRE(
        fs::is_directory(set),
        "[golden] wanted a directory of golden files, {} is none: set BIFOCAL_GOLDEN_DIR",
        set.string());
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(set)) {
      if (entry.is_regular_file() && accept(entry.path())) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    if (!found.empty()) return found;
  }
  fail("[golden] no golden files of this kind in {}", kCommitted.string());
}

}  // namespace

std::vector<fs::path> golden_files(const std::string& prefix) {
  return find([&](const fs::path& path) {
    return path.extension() == ".h5" && path.filename().string().starts_with(prefix);
  });
}

std::vector<fs::path> golden_checkpoints() {
  std::vector<fs::path> directories =
      find([](const fs::path& path) { return path.filename() == "expected.safetensors"; });
  for (fs::path& path : directories) path = path.parent_path();
  return directories;
}

struct GoldenVisitor {
  GoldenFile& file;
  std::string current;

  static herr_t visit_attribute(hid_t object, const char* name, const H5A_info_t*, void* self) {
    auto& visitor = *static_cast<GoldenVisitor*>(self);
    const std::string key = visitor.current.empty() ? name : visitor.current + "." + name;
    const Hdf5Handle attribute(BIFOCAL_HDF5(H5Aopen(object, name, H5P_DEFAULT)), H5Aclose);
    const Hdf5Handle type(BIFOCAL_HDF5(H5Aget_type(attribute.get())), H5Tclose);
    if (H5Tget_class(type.get()) == H5T_STRING) {
      const Hdf5Handle memory_type(BIFOCAL_HDF5(H5Tcopy(H5T_C_S1)), H5Tclose);
      BIFOCAL_HDF5(H5Tset_size(memory_type.get(), H5T_VARIABLE));
      BIFOCAL_HDF5(H5Tset_cset(memory_type.get(), H5Tget_cset(type.get())));
      char* text = nullptr;
      BIFOCAL_HDF5(H5Aread(attribute.get(), memory_type.get(), &text));
      visitor.file.texts_[key] = text;
      H5free_memory(text);
      return 0;
    }
    if (H5Tget_class(type.get()) == H5T_ENUM) {  // h5py's bool
      std::int8_t flag = 0;
      BIFOCAL_HDF5(H5Aread(attribute.get(), type.get(), &flag));
      visitor.file.numbers_[key] = flag;
      return 0;
    }
    double number = 0.0;
    BIFOCAL_HDF5(H5Aread(attribute.get(), H5T_NATIVE_DOUBLE, &number));
    visitor.file.numbers_[key] = number;
    return 0;
  }

  static herr_t visit_object(hid_t root, const char* name, const H5O_info_t* info, void* self) {
    auto& visitor = *static_cast<GoldenVisitor*>(self);
    const std::string path = name;
    const Hdf5Handle object(BIFOCAL_HDF5(H5Oopen(root, name, H5P_DEFAULT)), H5Oclose);
    visitor.current = path == "." ? "" : path;
    BIFOCAL_HDF5(
        H5Aiterate(object.get(), H5_INDEX_NAME, H5_ITER_INC, nullptr, visit_attribute, self));
    if (info->type != H5O_TYPE_DATASET) return 0;
    const Hdf5Handle space(BIFOCAL_HDF5(H5Dget_space(object.get())), H5Sclose);
    hsize_t dims[Shape::kMaxRank] = {};
    const int rank = BIFOCAL_HDF5(H5Sget_simple_extent_dims(space.get(), dims, nullptr));
    Shape shape;
    for (int dim = 0; dim < rank; ++dim) shape.append(static_cast<std::int64_t>(dims[dim]));
    std::vector<double> values(static_cast<std::size_t>(shape.size()));
    BIFOCAL_HDF5(
        H5Dread(object.get(), H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
    visitor.file.values_[path] = std::move(values);
    visitor.file.shapes_[path] = shape;
    return 0;
  }
};

GoldenFile::GoldenFile(const fs::path& path) {
  const Hdf5Handle file(BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)), H5Fclose);
  GoldenVisitor visitor{*this, ""};
  BIFOCAL_HDF5(H5Ovisit2(file.get(),
                         H5_INDEX_NAME,
                         H5_ITER_INC,
                         GoldenVisitor::visit_object,
                         &visitor,
                         H5O_INFO_BASIC));
}

const std::vector<double>& GoldenFile::values(const std::string& dataset) const {
  BIFOCAL_REQUIRE(has(dataset), "[golden] no dataset {}", dataset);
  return values_.at(dataset);
}

const Shape& GoldenFile::shape(const std::string& dataset) const {
  BIFOCAL_REQUIRE(has(dataset), "[golden] no dataset {}", dataset);
  return shapes_.at(dataset);
}

std::vector<std::string> GoldenFile::names(const std::string& group) const {
  std::vector<std::string> names;
  for (const auto& [path, values] : values_) {
    if (path.starts_with(group + "/")) names.push_back(path.substr(group.size() + 1));
  }
  return names;
}

double GoldenFile::number(const std::string& attribute) const {
  BIFOCAL_REQUIRE(numbers_.contains(attribute), "[golden] no numeric attribute {}", attribute);
  return numbers_.at(attribute);
}

const std::string& GoldenFile::text(const std::string& attribute) const {
  BIFOCAL_REQUIRE(texts_.contains(attribute), "[golden] no text attribute {}", attribute);
  return texts_.at(attribute);
}

Tensor GoldenFile::tensor(Memory& memory, DType dtype, const std::string& dataset) const {
  Tensor tensor = memory.empty(Region::activations, dtype, shape(dataset));
  const std::vector<double>& source = values(dataset);
  const auto copy = [&]<class T>(T* destination) {
    std::transform(
        source.begin(), source.end(), destination, [](double x) { return static_cast<T>(x); });
  };
  switch (dtype) {
    case DType::f64:
      copy(tensor.as<double>());
      break;
    case DType::f32:
      copy(tensor.as<float>());
      break;
    case DType::i32:
      copy(tensor.as<std::int32_t>());
      break;
    case DType::u8:
      copy(tensor.as<std::uint8_t>());
      break;
    default:
      fail("[golden] no conversion to {}", name_of(dtype));
  }
  return tensor;
}

std::vector<std::int32_t> GoldenFile::starts() const {
  const std::vector<double>& doc = values("in/doc");
  std::vector<std::int32_t> starts;
  for (std::size_t token = 0; token < doc.size(); ++token) {
    const bool first = token == 0 || doc[token] != doc[token - 1];
    starts.push_back(first ? static_cast<std::int32_t>(token) : starts.back());
  }
  return starts;
}

double GoldenFile::largest(const std::string& group) const {
  double largest = 0.0;
  for (const auto& [path, values] : values_) {
    if (!path.starts_with(group + "/")) continue;
    for (const double value : values) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

GoldenTolerance golden_tolerance(DType dtype, const fs::path& file) {
  if (dtype == DType::f64) return {1e-9, 1e-9};
  if (file.stem().string().find("extreme_gates") != std::string::npos) return {1e-4, 1e-3};
  return {1e-5, 2e-5};
}

MixerSettings golden_mixer_settings(const GoldenFile& file) {
  MixerSettings settings;
  settings.window = static_cast<std::int64_t>(file.number("window"));
  settings.sink = parse_sink(file.text("sink"));
  settings.sink_tokens = static_cast<std::int64_t>(file.number("sink_tokens"));
  settings.states = parse_states(file.text("states"));
  settings.mix = parse_mix(file.text("mix"));
  return settings;
}

std::vector<MixerSettings> golden_model_settings(const GoldenFile& file) {
  std::vector<MixerSettings> all;
  for (const auto& object : nlohmann::json::parse(file.text("mixers"))) {
    MixerSettings settings;
    const auto& window = object.at("window");
    settings.window = window == "full" ? MixerSettings::kFullWindow : window.get<std::int64_t>();
    settings.sink = parse_sink(object.at("sink").get<std::string>());
    settings.sink_tokens = object.at("sink_tokens").get<std::int64_t>();
    settings.states = parse_states(object.at("states").get<std::string>());
    settings.mix = parse_mix(object.at("mix").get<std::string>());
    all.push_back(settings);
  }
  return all;
}

}  // namespace bifocal::test
