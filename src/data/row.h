// One packed row: documents side by side, padding at the end.
#pragma once

#include <cstdint>
#include <vector>

namespace bifocal {

// All vectors have row_tokens elements. Padding is one document of its own at the row's end that is
// never kept.
struct Row {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> next;   // id of the successor inside the document, -1 at a document's
                                    // last token and in padding
  std::vector<std::int32_t> start;  // index in this row of the document's first token
  std::vector<std::uint8_t> keep;   // whether the distribution predicted here counts
  std::int64_t padding = 0;         // tokens of padding

  std::int64_t tokens() const { return static_cast<std::int64_t>(ids.size()); }
};

}  // namespace bifocal
