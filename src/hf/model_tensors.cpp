// Whether a checkpoint holds exactly what a model needs.
#include "hf/model_tensors.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";

bool is_floating(DType type) {
  return type == DType::f64 || type == DType::f32 || type == DType::bf16 || type == DType::f16;
}

bool have_equal_values(const SafetensorsReader& reader, const char* left, const char* right) {
  const SafetensorsEntry& a = reader.at(left);
  const SafetensorsEntry& b = reader.at(right);
  if (a.shape != b.shape) {
    return false;
  }
  const std::int64_t size = a.shape.size();
  if (a.dtype == b.dtype) {
    return std::memcmp(a.data, b.data, static_cast<std::size_t>(size) * size_of(a.dtype)) == 0;
  }
  constexpr std::int64_t kPiece = 1 << 20;
  std::vector<double> values_a(static_cast<std::size_t>(std::min(size, kPiece)));
  std::vector<double> values_b(values_a.size());
  for (std::int64_t begin = 0; begin < size; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, size - begin);
    reader.read(left, begin, {values_a.data(), DType::f64, {count}});
    reader.read(right, begin, {values_b.data(), DType::f64, {count}});
    if (!std::equal(values_a.begin(), values_a.begin() + count, values_b.begin())) {
      return false;
    }
  }
  return true;
}

// What older programs saved beside the weights; it follows from rope_theta.
bool is_rotary_table(const std::string& name) {
  return name == "rotary_emb.inv_freq" || name.ends_with(".rotary_emb.inv_freq");
}

// "a, b, c and 7 more"
std::string enumerate(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  const std::size_t shown = std::min(names.size(), kShown);
  std::string text;
  for (std::size_t i = 0; i < shown; ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > shown) {
    text += fmt::format(" and {} more", names.size() - shown);
  }
  return text;
}

}  // namespace

void check_model_tensors(const SafetensorsReader& reader, const ParameterTable& table) {
  std::vector<std::string> missing;
  for (const Parameter& parameter : table.parameters()) {
    if (!reader.contains(parameter.name)) {
      missing.push_back(parameter.name);
      continue;
    }
    const SafetensorsEntry& entry = reader.at(parameter.name);
    BIFOCAL_REQUIRE(is_floating(entry.dtype) && entry.shape == parameter.shape,
                    "[model] {}: tensor {} is {} {}, config.json asks for {}: the weights are of "
                    "another model",
                    entry.file.string(),
                    parameter.name,
                    name_of(entry.dtype),
                    to_string(entry.shape),
                    to_string(parameter.shape));
  }
  BIFOCAL_REQUIRE(missing.empty(),
                  "[model] the checkpoint lacks {}: config.json describes another model",
                  enumerate(missing));

  std::vector<std::string> extra;
  for (const auto& [name, entry] : reader.entries()) {
    if (table.contains(name) || is_rotary_table(name)) {
      continue;
    }
    if (name == kHead) {
      BIFOCAL_REQUIRE(have_equal_values(reader, kHead, kEmbedding),
                      "[model] {}: config.json ties the head to the embedding, but lm_head.weight "
                      "differs from it: set tie_word_embeddings to false",
                      entry.file.string());
      continue;
    }
    extra.push_back(name);
  }
  BIFOCAL_REQUIRE(extra.empty(),
                  "[model] the checkpoint also holds {}, which the model of config.json does not "
                  "use: its mathematics would differ",
                  enumerate(extra));
}

}  // namespace bifocal
