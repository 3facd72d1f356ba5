// Whether a checkpoint holds exactly what a model needs.
#pragma once

#include "hf/safetensors.h"
#include "plan/parameter_table.h"

namespace bifocal {

// Throws Error unless the checkpoint holds every parameter of `table`, in its shape and a floating
// type, and nothing else. Two leftovers of other programs are accepted: rotary_emb.inv_freq, and on
// a tied model an lm_head.weight whose values equal the embedding's (which is read to compare).
void check_model_tensors(const SafetensorsReader& reader, const ParameterTable& table);

}  // namespace bifocal
