// Comparisons as Markdown and JSON.
#include "evaluate/compare_report.h"

#include <set>

#include <fmt/format.h>

#include "core/error.h"
#include "core/file.h"
#include "core/log.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

std::string rate_text(const Estimate& rate) {
  return fmt::format("{:.1f} % ({:.1f} to {:.1f})",
                     100.0 * rate.value,
                     100.0 * rate.interval.low,
                     100.0 * rate.interval.high);
}

std::string points_text(const Estimate& difference) {
  return fmt::format("{:+.1f} ({:+.1f} to {:+.1f})",
                     100.0 * difference.value,
                     100.0 * difference.interval.low,
                     100.0 * difference.interval.high);
}

std::string share_text(std::int64_t part, std::int64_t whole) {
  return fmt::format("{} ({:.1f} %)",
                     format_count(part),
                     100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

// A name inside a table's cell.
std::string cell(const std::string& name) {
  std::string text;
  for (const char c : name) {
    text += c == '|' ? "\\|" : c == '\n' ? " " : std::string(1, c);
  }
  return text;
}

std::string table_row(const std::vector<std::string>& cells) {
  std::string row = "|";
  for (const std::string& text : cells) {
    row.append(" ").append(text).append(" |");
  }
  return row + "\n";
}

std::string table_head(const std::vector<std::string>& cells) {
  std::string rule = "|---|";
  for (std::size_t i = 1; i < cells.size(); ++i) {
    rule += "---:|";
  }
  return table_row(cells) + rule + "\n";
}

std::string rates_table(const std::string& what,
                        const std::vector<GroupComparison>& groups,
                        const std::vector<SetSummary>& sets) {
  std::vector<std::string> head{what, "number", "typical tokens"};
  for (const SetSummary& set : sets) {
    head.push_back(cell(set.name));
  }
  for (std::size_t s = 1; s < sets.size(); ++s) {
    head.push_back(fmt::format("{} - {}", cell(sets[s].name), cell(sets[0].name)));
  }
  std::string table = table_head(head);
  for (const GroupComparison& group : groups) {
    std::vector<std::string> cells{cell(group.name),
                                   format_count(group.problems),
                                   fmt::format("{:.0f}", group.typical_tokens)};
    for (const Estimate& rate : group.rates) {
      cells.push_back(rate_text(rate));
    }
    for (const Estimate& difference : group.differences) {
      cells.push_back(points_text(difference));
    }
    table += table_row(cells);
  }
  return table;
}

std::string answers_table(const Comparison& comparison) {
  std::vector<std::string> head{"answers"};
  for (const SetSummary& set : comparison.sets) {
    head.push_back(cell(set.name));
  }
  std::string table = table_head(head);
  const auto row = [&](const std::string& what, const auto& text_of) {
    std::vector<std::string> cells{what};
    for (const SetSummary& set : comparison.sets) {
      cells.push_back(text_of(set));
    }
    table += table_row(cells);
  };
  const std::string edge = format_count(comparison.options.long_tokens);
  row("all", [](const SetSummary& set) { return format_count(set.answers); });
  row("median tokens",
      [](const SetSummary& set) { return fmt::format("{:.0f}", set.median_tokens); });
  row("correct", [](const SetSummary& set) { return share_text(set.correct, set.answers); });
  row(fmt::format("over {} tokens", edge),
      [](const SetSummary& set) { return share_text(set.long_answers, set.answers); });
  row(fmt::format("correct over {} tokens", edge),
      [](const SetSummary& set) { return format_count(set.correct_long); });
  row("cut off at the limit",
      [](const SetSummary& set) { return share_text(set.cut_off, set.answers); });
  row("repeat a final answer",
      [](const SetSummary& set) { return share_text(set.repeating, set.answers); });
  row("cut off and repeating",
      [](const SetSummary& set) { return share_text(set.cut_repeating, set.answers); });
  row("points if cut-off answers that state the right answer counted",
      [](const SetSummary& set) { return fmt::format("{:+.1f}", 100.0 * set.credit_stated); });
  row("points if cut-off answers with the right answer anywhere counted",
      [](const SetSummary& set) { return fmt::format("{:+.1f}", 100.0 * set.credit_anywhere); });
  std::set<std::string> graders;
  for (const SetSummary& set : comparison.sets) {
    for (const GraderAgreement& agreement : set.agreements) {
      graders.insert(agreement.second);
    }
  }
  for (const std::string& grader : graders) {
    row(fmt::format("graded alike by {}", grader), [&](const SetSummary& set) {
      for (const GraderAgreement& agreement : set.agreements) {
        if (agreement.second == grader) {
          return fmt::format("{} of {}; {} of {} problems",
                             format_count(agreement.answers),
                             format_count(set.answers),
                             format_count(agreement.problems),
                             format_count(set.problems));
        }
      }
      return std::string("-");
    });
  }
  return table;
}

Json estimate_json(const Estimate& estimate) {
  return {
      {"value", estimate.value}, {"low", estimate.interval.low}, {"high", estimate.interval.high}};
}

Json group_json(const GroupComparison& group, const std::vector<SetSummary>& sets) {
  Json json{
      {"name", group.name}, {"problems", group.problems}, {"typical_tokens", group.typical_tokens}};
  for (std::size_t s = 0; s < sets.size(); ++s) {
    json["rates"][sets[s].name] = estimate_json(group.rates[s]);
    if (s > 0) {
      json["differences"][sets[s].name] = estimate_json(group.differences[s - 1]);
    }
  }
  return json;
}

Json groups_json(const std::vector<GroupComparison>& groups, const std::vector<SetSummary>& sets) {
  Json list = Json::array();
  for (const GroupComparison& group : groups) {
    list.push_back(group_json(group, sets));
  }
  return list;
}

Json set_json(const SetSummary& set) {
  Json json{{"name", set.name},
            {"answers", set.answers},
            {"correct", set.correct},
            {"median_tokens", set.median_tokens},
            {"long_answers", set.long_answers},
            {"correct_long", set.correct_long},
            {"cut_off", set.cut_off},
            {"repeating", set.repeating},
            {"cut_off_repeating", set.cut_repeating},
            {"credit_stated", set.credit_stated},
            {"credit_anywhere", set.credit_anywhere},
            {"agreements", Json::array()}};
  for (const GraderAgreement& agreement : set.agreements) {
    json["agreements"].push_back({{"graders", {agreement.first, agreement.second}},
                                  {"answers", agreement.answers},
                                  {"problems", agreement.problems}});
  }
  return json;
}

Json row_of(const std::string& name, const Estimate& rate, std::int64_t samples) {
  return {{"name", name},
          {"unit", "share"},
          {"ours", rate.value},
          {"samples", samples},
          {"low", rate.interval.low},
          {"high", rate.interval.high}};
}

// Answers of a set in a group are not counted there: all problems of a set have as many samples,
// or the number is left to the whole.
Json rows_of(const Comparison& comparison) {
  Json rows = Json::array();
  const std::int64_t per_problem =
      comparison.least_samples == comparison.most_samples ? comparison.least_samples : 1;
  for (std::size_t s = 0; s < comparison.sets.size(); ++s) {
    const SetSummary& set = comparison.sets[s];
    const auto add_group = [&](const std::string& name, const GroupComparison& group) {
      rows.push_back(row_of(name, group.rates[s], group.problems * per_problem));
    };
    rows.push_back(row_of("pass1_" + set.name, comparison.all.rates[s], set.answers));
    for (const GroupComparison& group : comparison.by_length) {
      add_group(fmt::format("pass1_{}_{}", set.name, group.name), group);
    }
    for (const GroupComparison& group : comparison.groups) {
      add_group(fmt::format("solved_{}_{}", set.name, group.name), group);
    }
    if (s > 0) {
      rows.push_back(row_of("gain_" + set.name, comparison.all.differences[s - 1], set.answers));
      for (const GroupComparison& group : comparison.by_length) {
        rows.push_back(row_of(fmt::format("gain_{}_{}", set.name, group.name),
                              group.differences[s - 1],
                              group.problems * per_problem));
      }
    }
    const auto share = [&](std::int64_t part) {
      return static_cast<double>(part) / static_cast<double>(set.answers);
    };
    const auto add_value = [&](const std::string& name, const std::string& unit, double value) {
      rows.push_back({{"name", name + "_" + set.name},
                      {"unit", unit},
                      {"ours", value},
                      {"samples", set.answers}});
    };
    add_value("correct_long", "answers", static_cast<double>(set.correct_long));
    add_value("cut_off", "share", share(set.cut_off));
    add_value("repeating", "share", share(set.repeating));
    add_value("credit_stated", "share", set.credit_stated);
    add_value("credit_anywhere", "share", set.credit_anywhere);
  }
  return rows;
}

}  // namespace

std::string comparison_markdown(const Comparison& comparison, const ReportOrigin& origin) {
  std::string text = fmt::format("## {}\n\n", origin.what);
  if (!origin.command.empty()) {
    text += fmt::format("`{}`\n", origin.command);
  }
  text += fmt::format("Commit {}, {}, {}.", origin.commit, origin.date, origin.machine);
  text += origin.notes.empty() ? "\n\n" : " " + origin.notes + "\n\n";
  const std::string samples =
      comparison.least_samples == comparison.most_samples
          ? std::to_string(comparison.least_samples)
          : fmt::format("{} to {}", comparison.least_samples, comparison.most_samples);
  text += fmt::format(
      "Share of right answers, {} per problem, averaged over problems. In brackets the 95 % "
      "interval of a paired bootstrap over problems ({} resamples); differences are in points. A "
      "problem's typical length is the median over all answers to it.\n\n",
      samples,
      format_count(comparison.options.resamples));
  std::vector<GroupComparison> lengths{comparison.all};
  for (GroupComparison group : comparison.by_length) {
    group.name += fmt::format(" ({} {} tokens)",
                              group.name == "long" ? "over" : "up to",
                              format_count(comparison.options.long_tokens));
    lengths.push_back(std::move(group));
  }
  text += rates_table("problems", lengths, comparison.sets);
  text.append("\n").append(
      rates_table("typical length in tokens", comparison.bins, comparison.sets));
  if (!comparison.groups.empty()) {
    text.append("\n").append(rates_table("group", comparison.groups, comparison.sets));
  }
  text.append("\n").append(answers_table(comparison));
  for (const std::string& warning : comparison.warnings) {
    text += fmt::format("\nWarning: {}.\n", warning);
  }
  return text;
}

Json comparison_json(const Comparison& comparison, const ReportOrigin& origin) {
  Json entry{{"what", origin.what},
             {"command", origin.command},
             {"long_tokens", comparison.options.long_tokens},
             {"resamples", comparison.options.resamples},
             {"seed", comparison.options.seed},
             {"least_samples", comparison.least_samples},
             {"most_samples", comparison.most_samples},
             {"sets", Json::array()}};
  for (const SetSummary& set : comparison.sets) {
    entry["sets"].push_back(set_json(set));
  }
  entry["all"] = group_json(comparison.all, comparison.sets);
  entry["by_length"] = groups_json(comparison.by_length, comparison.sets);
  entry["bins"] = groups_json(comparison.bins, comparison.sets);
  entry["groups"] = groups_json(comparison.groups, comparison.sets);
  entry["left_out"] = comparison.left_out;
  entry["warnings"] = comparison.warnings;
  Json report{{"what", origin.what},
              {"command", origin.command},
              {"commit", origin.commit},
              {"date", origin.date},
              {"machine", origin.machine},
              {"notes", origin.notes},
              {"rows", rows_of(comparison)}};
  report["comparisons"] = Json::array({entry});
  return report;
}

Json append_report(const std::filesystem::path& path, const Json& more) {
  Json report = Json::parse(read_file(path), nullptr, false);
  BIFOCAL_REQUIRE(report.is_object() && report.contains("rows") && report.contains("comparisons"),
                  "[compare] {} is no report of `bifocal compare`: leave out --append",
                  path.string());
  std::set<std::string> names;
  for (const Json& row : report["rows"]) {
    names.insert(row.at("name").get<std::string>());
  }
  for (const Json& row : more.at("rows")) {
    const auto name = row.at("name").get<std::string>();
    BIFOCAL_REQUIRE(!names.contains(name),
                    "[compare] {} has a row {} already: give the sets other names",
                    path.string(),
                    name);
    report["rows"].push_back(row);
  }
  for (const Json& entry : more.at("comparisons")) {
    report["comparisons"].push_back(entry);
  }
  return report;
}

}  // namespace bifocal
