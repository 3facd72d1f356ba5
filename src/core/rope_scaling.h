// Rope scaling of Llama 3.1 and 3.2 (`rope_type: llama3`).
#pragma once

namespace bifocal {

// factor 1 means no scaling.
struct RopeScaling {
  double factor = 1.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position = 8192.0;
  bool operator==(const RopeScaling&) const = default;
};

}  // namespace bifocal
