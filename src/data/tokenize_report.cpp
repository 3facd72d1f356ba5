// Tables and JSON of a tokenize run.
#include "data/tokenize_report.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/log.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

// Sources that the table of lengths has a column for; JSON has all of them.
constexpr std::size_t kMostColumns = 5;

std::array<std::pair<const char*, const SplitReport*>, 2> splits_of(const TokenizeReport& report) {
  return {{{"train", &report.train}, {"held_out", &report.held_out}}};
}

void add_lengths(std::vector<std::int64_t>& sum, const std::vector<std::int64_t>& part) {
  sum.resize(std::max(sum.size(), part.size()));
  std::ranges::transform(part, sum, sum.begin(), std::plus<>());
}

std::string source_row(std::string_view number, const SourceReport& source) {
  return fmt::format("{:>6} {:>8} {:>12} {:>16} {:>16} {:>9} {:>9} {:>10.1f}  {}\n",
                     number,
                     format_count(source.files),
                     format_count(source.documents),
                     format_count(source.tokens),
                     format_count(source.kept),
                     format_count(source.empty),
                     format_count(source.too_long),
                     static_cast<double>(source.bytes) / 1e6,
                     source.name);
}

std::string length_table(const std::vector<SourceReport>& sources, const SourceReport& total) {
  std::vector<const SourceReport*> columns;
  std::string text = fmt::format("{:>25}", "tokens of a document");
  if (sources.size() > 1 && sources.size() <= kMostColumns) {
    for (const SourceReport& source : sources) {
      columns.push_back(&source);
      text += fmt::format(" {:>12}", fmt::format("source {}", columns.size()));
    }
  }
  columns.push_back(&total);
  text += fmt::format(" {:>12}\n", "documents");
  for (std::size_t power = 0; power < total.lengths.size(); ++power) {
    if (total.lengths[power] == 0) {
      continue;
    }
    const std::int64_t least = std::int64_t{1} << power;
    text += fmt::format("{:>11} to {:>10}", format_count(least), format_count(2 * least - 1));
    for (const SourceReport* column : columns) {
      const std::int64_t count = power < column->lengths.size() ? column->lengths[power] : 0;
      text += fmt::format(" {:>12}", format_count(count));
    }
    text += '\n';
  }
  return text;
}

Json source_json(const SourceReport& source) {
  Json lengths = Json::array();
  for (std::size_t power = 0; power < source.lengths.size(); ++power) {
    if (source.lengths[power] > 0) {
      const std::int64_t least = std::int64_t{1} << power;
      lengths.push_back(
          {{"from", least}, {"to", 2 * least - 1}, {"documents", source.lengths[power]}});
    }
  }
  return {{"name", source.name},
          {"files", source.files},
          {"bytes", source.bytes},
          {"documents", source.documents},
          {"tokens", source.tokens},
          {"kept", source.kept},
          {"empty", source.empty},
          {"too_long", source.too_long},
          {"lengths", std::move(lengths)}};
}

}  // namespace

void SourceReport::add(std::int64_t num_tokens, std::int64_t num_kept) {
  documents += 1;
  tokens += num_tokens;
  kept += num_kept;
  const auto power =
      static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(num_tokens)) - 1);
  lengths.resize(std::max(lengths.size(), power + 1));
  lengths[power] += 1;
}

SourceReport TokenizeReport::total() const {
  SourceReport sum{.name = "all"};
  for (const SourceReport& source : sources) {
    sum.files += source.files;
    sum.bytes += source.bytes;
    sum.documents += source.documents;
    sum.tokens += source.tokens;
    sum.kept += source.kept;
    sum.empty += source.empty;
    sum.too_long += source.too_long;
    add_lengths(sum.lengths, source.lengths);
  }
  return sum;
}

std::string to_text(const TokenizeReport& report) {
  std::string text = fmt::format(
      "{:<9} {:>12} {:>16} {:>16} {:>7}\n", "split", "documents", "tokens", "kept", "shards");
  for (const auto& [name, part] : splits_of(report)) {
    text += fmt::format("{:<9} {:>12} {:>16} {:>16} {:>7}\n",
                        name,
                        format_count(part->documents),
                        format_count(part->tokens),
                        format_count(part->kept),
                        format_count(part->shards));
  }
  const SourceReport total = report.total();
  text += fmt::format("held out: {:.2f} % of the documents\n\n",
                      100.0 * static_cast<double>(report.held_out.documents) /
                          static_cast<double>(std::max<std::int64_t>(total.documents, 1)));
  text += fmt::format("{:>6} {:>8} {:>12} {:>16} {:>16} {:>9} {:>9} {:>10}\n",
                      "source",
                      "files",
                      "documents",
                      "tokens",
                      "kept",
                      "empty",
                      "too long",
                      "MB text");
  for (std::size_t i = 0; i < report.sources.size(); ++i) {
    text += source_row(fmt::format("{}", i + 1), report.sources[i]);
  }
  if (report.sources.size() > 1) {
    text += source_row("", total);
  }
  return text + "\n" + length_table(report.sources, total);
}

nlohmann::ordered_json to_json(const TokenizeReport& report) {
  Json json;
  for (const auto& [name, part] : splits_of(report)) {
    json["splits"][name] = {{"documents", part->documents},
                            {"tokens", part->tokens},
                            {"kept", part->kept},
                            {"shards", part->shards}};
  }
  json["sources"] = Json::array();
  for (const SourceReport& source : report.sources) {
    json["sources"].push_back(source_json(source));
  }
  json["total"] = source_json(report.total());
  return json;
}

}  // namespace bifocal
