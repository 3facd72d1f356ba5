// What a run says about its data: padding, the sources' shares of the tokens, their epochs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/row_source.h"

namespace bifocal {

// A source that began to draw another epoch.
struct EpochBegin {
  std::string source;
  std::int64_t number = 0;  // 2 is the first repetition
};

// In rows [begin, end).
std::vector<EpochBegin> epochs_begun(const RowSource& rows, std::int64_t begin, std::int64_t end);

// Of rows [0, position), position > 0: {"rows", "tokens", "padding", "sources": {name: {"share",
// "epochs"}}}; tokens are without padding, padding and shares are fractions.
nlohmann::ordered_json data_metrics(const RowSource& rows, std::int64_t position);

// The same for people, in one line.
std::string data_summary(const RowSource& rows, std::int64_t position);

}  // namespace bifocal
