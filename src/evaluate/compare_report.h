// A comparison as people and machines read it.
#pragma once

#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>

#include "evaluate/compare.h"

namespace bifocal {

// Where the numbers come from.
struct ReportOrigin {
  std::string what;  // title
  std::string command;
  std::string commit;
  std::string date;     // 2026-12-01
  std::string machine;  // "2 CPU cores, Debian 12"
  std::string notes;
};

// A section of Markdown: tables of rates by length, by bins and by groups, of answers and their
// failures, and the warnings.
std::string comparison_markdown(const Comparison& comparison, const ReportOrigin& origin);

// {"what", "command", "commit", "date", "machine", "notes", "rows", "comparisons"}. A row has name,
// unit, ours and, for rates, samples (answers), low and high. Names: pass1_SET, pass1_SET_short,
// pass1_SET_long, solved_SET_GROUP, gain_SET and gain_SET_long (over the first set), and
// correct_long_SET, cut_off_SET, repeating_SET, credit_stated_SET, credit_anywhere_SET. The one
// entry of comparisons has everything that the Markdown shows.
nlohmann::ordered_json comparison_json(const Comparison& comparison, const ReportOrigin& origin);

// Adds the rows and comparisons of `more` to the report in a file. Throws Error for a file that is
// no such report or has a row of the same name.
nlohmann::ordered_json append_report(const std::filesystem::path& path,
                                     const nlohmann::ordered_json& more);

}  // namespace bifocal
