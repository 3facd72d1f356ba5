// What a config.json may not ask for, because our forward pass would compute something else.
#pragma once

#include "config/model_config.h"
#include "hf/json_fields.h"

namespace bifocal {

// Throws Error with the reason for the first key that changes the mathematics of a decoder of
// `family`. Rope is judged where it is read.
void refuse_other_mathematics(const JsonFields& config, Family family, std::int64_t layers);

// Throws Error where the directory brings code other than an export's own, or names an architecture
// that is not a causal language model of our types.
void refuse_other_code(const JsonFields& config, bool is_student);

}  // namespace bifocal
