// Counts of rows as metrics and lines.
#include "train/data_log.h"

#include <fmt/format.h>

#include "core/log.h"

namespace bifocal {

namespace {

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

}  // namespace

std::vector<EpochBegin> epochs_begun(const RowSource& rows, std::int64_t begin, std::int64_t end) {
  const PackCounts before = rows.counts(begin);
  const PackCounts after = rows.counts(end);
  std::vector<EpochBegin> begun;
  for (std::size_t i = 0; i < after.sources.size(); ++i) {
    for (std::int64_t epoch = before.sources[i].epoch; epoch < after.sources[i].epoch; ++epoch) {
      begun.push_back({rows.sources()[i].name, epoch + 2});
    }
  }
  return begun;
}

nlohmann::ordered_json data_metrics(const RowSource& rows, std::int64_t position) {
  const PackCounts counts = rows.counts(position);
  const std::int64_t tokens = counts.tokens();
  nlohmann::ordered_json sources;
  for (std::size_t i = 0; i < counts.sources.size(); ++i) {
    const SourceSize& size = rows.sources()[i];
    sources[size.name] = {{"share", share(counts.sources[i].tokens, tokens)},
                          {"epochs", size.epochs(counts.sources[i])}};
  }
  return {{"rows", counts.rows},
          {"tokens", tokens},
          {"padding", share(counts.padding, tokens + counts.padding)},
          {"sources", sources}};
}

std::string data_summary(const RowSource& rows, std::int64_t position) {
  const PackCounts counts = rows.counts(position);
  const std::int64_t tokens = counts.tokens();
  std::string line = fmt::format("data so far: {} rows, {} tokens, {:.2f} % padding;",
                                 format_count(counts.rows),
                                 format_count(tokens),
                                 100.0 * share(counts.padding, tokens + counts.padding));
  for (std::size_t i = 0; i < counts.sources.size(); ++i) {
    const SourceSize& size = rows.sources()[i];
    line += fmt::format(" {} {:.2f} % ({:.2f} epochs),",
                        size.name,
                        100.0 * share(counts.sources[i].tokens, tokens),
                        size.epochs(counts.sources[i]));
  }
  line.back() = '.';
  return line;
}

}  // namespace bifocal
