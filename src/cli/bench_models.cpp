// Shapes and rows for benchmarks.
#include <algorithm>
#include <cctype>
#include <filesystem>

#include <fmt/format.h>

#include "cli/bench.h"
#include "core/error.h"
#include "core/random.h"
#include "hf/hf_config.h"

namespace bifocal {

namespace {

struct NamedModel {
  const char* name;
  const char* label;
  ModelConfig config;
};

const std::vector<NamedModel>& named_models() {
  static const std::vector<NamedModel> models = {
      {"qwen3-4b",
       "qwen3_4b",
       {.vocabulary = 151936,
        .hidden = 2560,
        .intermediate = 9728,
        .layers = 36,
        .heads = 32,
        .kv_heads = 8,
        .head_dim = 128,
        .rope_theta = 5e6,
        .qk_norm = true,
        .max_position = 262144}},
      {"qwen3.5-4b",
       "qwen35_4b",
       {.vocabulary = 248320,
        .hidden = 2560,
        .intermediate = 9216,
        .layers = 32,
        .heads = 16,
        .kv_heads = 4,
        .head_dim = 256,
        .rope_theta = 1e7,
        .qk_norm = true,
        .max_position = 262144}},
      {"tiny",
       "tiny",
       {.vocabulary = 96,
        .hidden = 32,
        .intermediate = 48,
        .layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 16,
        .qk_norm = true,
        .max_position = 4096}},
  };
  return models;
}

}  // namespace

ModelConfig bench_model(const std::string& name) {
  for (const NamedModel& model : named_models()) {
    if (model.name == name) {
      ModelConfig config = model.config;
      config.mixers.resize(static_cast<std::size_t>(config.layers));
      return config;
    }
  }
  const std::filesystem::path path = name;
  BIFOCAL_REQUIRE(std::filesystem::exists(path),
                  "[bench] wanted a model as qwen3-4b, qwen3.5-4b, tiny or the path of a "
                  "config.json, got {}",
                  name);
  return read_hf_config(std::filesystem::is_directory(path) ? path : path.parent_path());
}

std::string model_label(const std::string& name) {
  for (const NamedModel& model : named_models()) {
    if (model.name == name) {
      return model.label;
    }
  }
  std::filesystem::path path = std::filesystem::absolute(name).lexically_normal();
  if (path.filename().empty() || !std::filesystem::is_directory(path)) {  // "DIR/", a file
    path = path.parent_path();
  }
  std::string label = path.filename().string();
  std::ranges::replace_if(
      label, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; }, '_');
  return label;
}

std::string student_label(const std::string& preset) {
  if (preset == kKeepPreset) {
    return "teacher";
  }
  return preset == "swa_learned_sink" ? "swa" : preset;
}

std::string length_label(std::int64_t tokens) {
  return tokens % 1024 == 0 ? fmt::format("{}k", tokens / 1024) : fmt::format("{}", tokens);
}

std::vector<std::int64_t> document_lengths(std::int64_t row_tokens, std::int64_t length) {
  const std::int64_t most = length == 0 ? row_tokens : length;
  std::vector<std::int64_t> documents;
  for (std::int64_t begin = 0; begin < row_tokens; begin += most) {
    documents.push_back(std::min(most, row_tokens - begin));
  }
  return documents;
}

Row random_bench_row(const std::vector<std::int64_t>& documents,
                     std::int64_t vocabulary,
                     std::uint64_t seed) {
  const std::uint64_t stream = stream_of("bench.ids");
  Row row;
  for (const std::int64_t tokens : documents) {
    const auto start = static_cast<std::int32_t>(row.ids.size());
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::uint64_t id =
          random_below(static_cast<std::uint64_t>(vocabulary), seed, stream, row.ids.size());
      row.ids.push_back(static_cast<std::int32_t>(id));
      row.start.push_back(start);
      row.keep.push_back(i + 1 < tokens ? 1 : 0);
    }
  }
  row.next.assign(row.ids.begin() + 1, row.ids.end());
  row.next.push_back(-1);
  for (std::size_t i = 0; i < row.keep.size(); ++i) {
    row.next[i] = row.keep[i] != 0 ? row.next[i] : -1;
  }
  return row;
}

}  // namespace bifocal
