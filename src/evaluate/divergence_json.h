// Divergences in reports and metrics.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "evaluate/divergence.h"

namespace bifocal {

// "1", "2-3", "4-7", ...: positions of a bucket of Divergence.
std::string position_name(std::size_t bucket);

// {"tokens", "kl", "top1_agreement", "student_perplexity", "teacher_perplexity"}
nlohmann::ordered_json to_json(const DivergenceSums& sums);

// [{"position", and the above}] of the buckets with tokens.
nlohmann::ordered_json by_position_json(const Divergence& divergence);

}  // namespace bifocal
