// Counting rows, and the counts as tables and JSON.
#include "data/row_report.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

double share(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

std::int64_t mean_length(const SourceSize& size) {
  return size.tokens / size.documents;
}

std::string rows_text(const RowReport& report) {
  const PackCounts& counts = report.counts;
  const std::int64_t tokens = counts.tokens();
  return fmt::format(
      "{} rows of {} tokens: {} tokens in {} documents and pieces, {:.3f} % padding\n"
      "{} rows have none, one row has at most {} tokens of it; {}\n",
      format_count(counts.rows),
      format_count(report.row_tokens),
      format_count(tokens),
      format_count(report.pieces),
      100.0 * share(counts.padding, tokens + counts.padding),
      format_count(report.full_rows),
      format_count(report.largest_padding),
      report.without_repeats == counts.rows ? "no document comes twice"
                                            : fmt::format("documents come again from row {} on",
                                                          format_count(report.without_repeats)));
}

std::string lengths_text(const RowReport& report) {
  std::size_t powers = 0;
  std::string text = fmt::format("\n{:<23}", "documents by tokens");
  for (const RowSourceReport& source : report.sources) {
    text += fmt::format("{:>14}", source.size.name);
    powers = std::max(powers, source.lengths.size());
  }
  for (std::size_t power = 0; power < powers; ++power) {
    const std::int64_t least = std::int64_t{1} << power;
    text += fmt::format("\n{:>9} to {:<10}", least, 2 * least - 1);
    for (const RowSourceReport& source : report.sources) {
      text += fmt::format(
          "{:>14}", power < source.lengths.size() ? format_count(source.lengths[power]) : "0");
    }
  }
  return text + "\n";
}

}  // namespace

RowReport report_rows(const RowSource& source, std::int64_t row_tokens, std::int64_t rows) {
  BIFOCAL_ASSERT(rows > 0);
  RowReport report{.row_tokens = row_tokens, .without_repeats = source.rows_without_repeats(rows)};
  for (std::int64_t position = 0; position < rows; ++position) {
    const RowPlan plan = source.plan(position);
    report.pieces += std::ssize(plan.pieces);
    report.full_rows += plan.padding == 0 ? 1 : 0;
    report.largest_padding = std::max(report.largest_padding, plan.padding);
  }
  report.counts = source.counts(rows);
  for (std::size_t i = 0; i < source.sources().size(); ++i) {
    report.sources.push_back(
        {source.sources()[i], report.counts.sources[i], source.length_histogram(i)});
  }
  return report;
}

std::string to_text(const RowReport& report) {
  std::string text = rows_text(report);
  text += fmt::format("\n{:<14}{:>7}{:>13}{:>16}{:>9} |{:>9}{:>9}{:>9}{:>13}{:>8}{:>9}\n",
                      "source",
                      "shards",
                      "documents",
                      "tokens",
                      "mean",
                      "weight",
                      "share",
                      "epochs",
                      "in the rows",
                      "cut",
                      "dropped");
  for (const auto& [size, counts, lengths] : report.sources) {
    text +=
        fmt::format("{:<14}{:>7}{:>13}{:>16}{:>9} |{:>7.2f} %{:>7.2f} %{:>9.3f}{:>13}{:>8}{:>9}\n",
                    size.name,
                    size.shards,
                    format_count(size.documents),
                    format_count(size.tokens),
                    format_count(mean_length(size)),
                    100.0 * size.weight,
                    100.0 * share(counts.tokens, report.counts.tokens()),
                    size.epochs(counts),
                    format_count(counts.documents),
                    format_count(counts.cut),
                    format_count(counts.dropped));
  }
  return text + lengths_text(report);
}

nlohmann::ordered_json to_json(const RowReport& report) {
  const PackCounts& counts = report.counts;
  Json json{{"rows", counts.rows},
            {"row_tokens", report.row_tokens},
            {"tokens", counts.tokens()},
            {"padding_tokens", counts.padding},
            {"padding", share(counts.padding, counts.tokens() + counts.padding)},
            {"pieces", report.pieces},
            {"rows_without_padding", report.full_rows},
            {"largest_padding_of_a_row", report.largest_padding},
            {"rows_without_repeats", report.without_repeats}};
  json["sources"] = Json::array();
  for (const auto& [size, source, lengths] : report.sources) {
    json["sources"].push_back({{"name", size.name},
                               {"shards", size.shards},
                               {"documents", size.documents},
                               {"tokens", size.tokens},
                               {"weight", size.weight},
                               {"share", share(source.tokens, counts.tokens())},
                               {"epochs", size.epochs(source)},
                               {"documents_in_rows", source.documents},
                               {"tokens_in_rows", source.tokens},
                               {"cut", source.cut},
                               {"dropped", source.dropped},
                               {"dropped_tokens", source.dropped_tokens},
                               {"documents_by_power_of_two", lengths}});
  }
  return json;
}

}  // namespace bifocal
