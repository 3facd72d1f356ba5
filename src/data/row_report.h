// What rows of a data set hold, source by source.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "data/row_source.h"

namespace bifocal {

struct RowSourceReport {
  SourceSize size;
  SourceCounts counts;                // of the rows
  std::vector<std::int64_t> lengths;  // [i]: documents of 2^i to 2^(i+1) - 1 tokens in the source
};

struct RowReport {
  std::int64_t row_tokens = 0;
  PackCounts counts;
  std::int64_t without_repeats = 0;  // rows before a document comes a second time
  std::int64_t pieces = 0;           // documents and parts of cut ones
  std::int64_t full_rows = 0;        // rows without padding
  std::int64_t largest_padding = 0;  // tokens, of one row
  std::vector<RowSourceReport> sources;
};

// Of rows [0, rows), rows > 0, of row_tokens tokens. Reads the lengths of all documents, no ids.
RowReport report_rows(const RowSource& source, std::int64_t row_tokens, std::int64_t rows);

// Tables for people.
std::string to_text(const RowReport& report);

nlohmann::ordered_json to_json(const RowReport& report);

}  // namespace bifocal
