// config.json of Hugging Face models, in and out.
#pragma once

#include <filesystem>
#include <string>

#include "config/model_config.h"
#include "core/dtype.h"

namespace bifocal {

// Reads DIR/config.json of a qwen3, qwen2, llama or bifocal model, or the older form with `mixer`,
// `window`, `sink_tokens`. Throws Error with the reason for everything that would change the
// mathematics. A base model's mixers are full attention in every layer.
ModelConfig read_hf_config(const std::filesystem::path& directory);

// The same from text; `where` names it in errors.
ModelConfig parse_hf_config(const std::string& json, const std::string& where);

// config.json of a model whose weights are saved as `dtype`. A student: model_type bifocal,
// base_model_type, the base model's keys (from model.source_json where there is one), one mixer
// object per layer, and the auto_map of its Python files. A model of full attention alone is
// written as its base type.
std::string write_hf_config(const ModelConfig& model, DType dtype = DType::f32);

// Whether any layer differs from the base model's attention.
bool is_student(const ModelConfig& model);

}  // namespace bifocal
