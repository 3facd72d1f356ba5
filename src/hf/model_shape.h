// The shape of any decoder that a Hugging Face config.json describes, trainable here or not.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "config/model_config.h"
#include "plan/cache_memory.h"

namespace bifocal {

struct ModelShape {
  std::string type;   // model_type of the decoder
  ModelConfig model;  // sizes only, every layer counted as an attention layer that could be a mixer
  bool has_dense_mlp = true;  // otherwise parameters cannot be counted from these sizes
  // The layers as the model has them; nothing where one is of a kind we cannot count.
  std::optional<NativeLayout> native;
  bool is_student = false;  // model.mixers are those of a bifocal student
};

// Reads a config.json or the one of a directory. Sizes may stand at the top or in a nested object
// of the text decoder (text_config). Says nothing on whether the model can be trained here: that is
// read_hf_config. Throws Error where a size is missing or a layer keeps no keys and values.
ModelShape read_model_shape(const std::filesystem::path& path);
ModelShape parse_model_shape(const std::string& json, const std::string& where);

}  // namespace bifocal
