// A tiny teacher whose heads are wide enough for tensor cores.
#pragma once

#include "support/tiny_model.h"

namespace bifocal::test {

inline ModelConfig tensor_core_teacher() {
  ModelConfig config = tiny_teacher();
  config.vocabulary = 320;
  config.hidden = 128;
  config.intermediate = 192;
  config.head_dim = 64;
  return config;
}

}  // namespace bifocal::test
