// A model as a Hugging Face directory.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

#include "config/model_config.h"
#include "plan/parameter_table.h"

namespace bifocal {

struct ExportOptions {
  ModelConfig model;
  std::filesystem::path teacher;    // directory that the model card names, with its licence
  std::filesystem::path tokenizer;  // directory whose tokenizer files are passed on
  std::filesystem::path output;     // must not exist, or be an empty directory
  DType dtype = DType::bf16;        // of the weights: bf16 or f32
  std::uint64_t shard_bytes = 5'000'000'000;  // most bytes of tensors in one weight file
  std::string origin;                         // where the weights come from, for the model card
  std::string commit;                         // of bifocal
  std::string configuration;  // resolved run configuration; empty for an untrained model
};

// The elements of a parameter, in its shape; the view must stay valid until the next call.
using TensorProvider = std::function<ConstTensorView(const Parameter&)>;

// Writes safetensors (shards with an index where they exceed shard_bytes), config.json, for a
// student the Python files that transformers loads it with, the teacher's tokenizer files (a
// tokenizer_config.json is made where there is none or it names no class), generation_config.json
// and a model card (README.md). Everything is written beside `output` and renamed at the end, so
// `output` is whole or absent. Throws Error where `output` is in use.
void export_model(const ExportOptions& options, const TensorProvider& provide);

}  // namespace bifocal
