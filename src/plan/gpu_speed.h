// What GPUs reach in a training step, for `plan` to foretell times.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace bifocal {

// By kind of work, as this program's kernels do it at Qwen3-4B's sizes in bfloat16. FLOP and bytes
// are those that step_flop.h and step_time.h count, which is why some rates are far below the
// device's.
struct GpuSpeed {
  std::string_view name;
  // FLOP/s.
  double products = 0.0;  // of rows with weights
  double full_attention = 0.0;
  double window_forward = 0.0, window_backward = 0.0;
  double features_forward = 0.0, features_backward = 0.0;
  double mlstm_forward = 0.0, mlstm_backward = 0.0;
  double head = 0.0;  // logits, loss and their gradients
  // Bytes/s.
  double memory = 0.0;  // elementwise work and the optimiser
  double link = 0.0;    // that a GPU receives from those of its host, by NCCL
  double host = 0.0;    // to or from the host's memory
  std::string_view source;
};

// By name, "h200"; none for names that are not known.
std::optional<GpuSpeed> gpu_speed(std::string_view name);

// "h200", "h100", "a100".
std::vector<std::string_view> gpu_names();

}  // namespace bifocal
