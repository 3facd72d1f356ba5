// Golden files: where they lie and how they are read. BIFOCAL_GOLDEN_DIR names another set of the
// same form.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "core/memory.h"

namespace bifocal::test {

// Files named prefix*.h5 of the set, sorted; where the set has none of this kind, of the committed
// one. Never empty.
std::vector<std::filesystem::path> golden_files(const std::string& prefix);

// Directories that hold expected.safetensors, likewise.
std::vector<std::filesystem::path> golden_checkpoints();

// All datasets and attributes of one file.
class GoldenFile {
 public:
  explicit GoldenFile(const std::filesystem::path& path);

  bool has(const std::string& dataset) const { return values_.contains(dataset); }

  // "group/name"; numbers of any stored type as doubles.
  const std::vector<double>& values(const std::string& dataset) const;
  const Shape& shape(const std::string& dataset) const;

  // Names inside a group.
  std::vector<std::string> names(const std::string& group) const;

  // Attributes of the root, or "steps.lr" for those of a group.
  double number(const std::string& attribute) const;
  const std::string& text(const std::string& attribute) const;

  bool has_attribute(const std::string& name) const {
    return numbers_.contains(name) || texts_.contains(name);
  }

  // A dataset as a tensor of this type.
  Tensor tensor(Memory& memory, DType dtype, const std::string& dataset) const;

  // Row::start of in/doc.
  std::vector<std::int32_t> starts() const;

  // Largest absolute value over a group's datasets.
  double largest(const std::string& group) const;

 private:
  friend struct GoldenVisitor;
  std::map<std::string, std::vector<double>> values_;
  std::map<std::string, Shape> shapes_;
  std::map<std::string, double> numbers_;
  std::map<std::string, std::string> texts_;
};

// Tolerances of shared specification "Tolerances that were measured", by compute type and kind of
// file.
struct GoldenTolerance {
  double output = 0.0;    // times max|ref|
  double gradient = 0.0;  // times the larger of max|ref| and 1 % of the file's largest gradient
};

GoldenTolerance golden_tolerance(DType dtype, const std::filesystem::path& file);

// One settings object ({"window", "sink", "sink_tokens", "states", "mix"}) of a golden file's
// attributes.
MixerSettings golden_mixer_settings(const GoldenFile& file);
std::vector<MixerSettings> golden_model_settings(const GoldenFile& file);

}  // namespace bifocal::test
