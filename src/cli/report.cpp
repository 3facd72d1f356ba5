// `bifocal report`: a run as one HTML page that needs nothing else.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/report_charts.h"
#include "cli/report_style.h"
#include "cli/run_record.h"
#include "core/file.h"
#include "core/log.h"
#include "core/memory.h"

namespace bifocal {

namespace {

constexpr std::size_t kEvents = 40;

std::string fact(std::string_view name, std::string_view value) {
  return fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escape_html(name), escape_html(value));
}

std::string facts(const RunRecord& run) {
  std::string out;
  if (!run.steps.empty()) {
    const StepRecord& last = run.steps.back();
    out += fact("stage", run.is_finished() ? "finished" : last.stage);
    out += fact(
        "step",
        fmt::format("{} of {}", format_count(last.stage_step), format_count(last.stage_steps)));
    out += fact("steps over all stages", format_count(last.step));
    out += fact("loss", fmt::format("{:.5f}", last.loss));
    if (!std::isnan(last.kl)) {
      out += fact("KL to the teacher", fmt::format("{:.5f}", last.kl));
    }
    out += fact("speed", format_tokens_per_second(last.tokens_per_second));
    if (!std::isnan(last.mfu)) {
      out += fact("MFU", fmt::format("{:.1f} %", 100.0 * last.mfu));
    }
    if (!std::isnan(last.memory)) {
      out += fact("memory, peak of rank 0", format_bytes(last.memory));
    }
    out += fact("skipped steps of the stage", format_count(last.skipped));
  }
  if (!run.validations.empty()) {
    const ValidationRecord& last = run.validations.back();
    out += fact("held-out KL", fmt::format("{:.5f}", last.kl));
    out += fact("held-out top-1", fmt::format("{:.2f} %", 100.0 * last.agreement));
    out += fact("held-out perplexity",
                fmt::format("{:.3f} (teacher {:.3f})", last.perplexity, last.teacher_perplexity));
  }
  return fmt::format("<dl class=\"facts\">\n{}</dl>\n", out);
}

// The first step of every stage but the first.
std::vector<double> stage_marks(const RunRecord& run) {
  std::vector<double> marks;
  for (std::size_t i = 1; i < run.steps.size(); ++i) {
    if (run.steps[i].stage != run.steps[i - 1].stage) {
      marks.push_back(static_cast<double>(run.steps[i].step));
    }
  }
  return marks;
}

Curve curve_of(const std::string& name, const RunRecord& run, double StepRecord::*value) {
  Curve curve{.name = name};
  for (const StepRecord& step : run.steps) {
    curve.points.emplace_back(static_cast<double>(step.step), step.*value);
  }
  return curve;
}

Curve curve_of(const std::string& name, const RunRecord& run, double ValidationRecord::*value) {
  Curve curve{.name = name};
  for (const ValidationRecord& validation : run.validations) {
    curve.points.emplace_back(static_cast<double>(validation.step), validation.*value);
  }
  return curve;
}

// Without curves that have no value.
std::string chart(const std::string& title,
                  std::vector<Curve> curves,
                  const std::vector<double>& marks,
                  const std::string& note = "") {
  std::erase_if(curves, [](const Curve& curve) {
    return std::ranges::none_of(curve.points,
                                [](const auto& point) { return std::isfinite(point.second); });
  });
  return draw(LineChart{.title = title, .note = note, .curves = std::move(curves), .marks = marks});
}

std::string training_charts(const RunRecord& run) {
  const std::vector<double> marks = stage_marks(run);
  const std::string note = marks.empty() ? "" : "Dashed: another stage begins, with another loss.";
  std::string out = chart("Loss", {curve_of("loss", run, &StepRecord::loss)}, marks, note);
  out += chart("KL to the teacher, nats a token",
               {curve_of("training rows", run, &StepRecord::kl),
                curve_of("held out", run, &ValidationRecord::kl)},
               marks);
  out += chart("Cross-entropy, nats a token", {curve_of("ce", run, &StepRecord::ce)}, marks);
  out += chart("Gradient norm before clipping", {curve_of("norm", run, &StepRecord::norm)}, marks);
  out += chart("Learning rate", {curve_of("rate", run, &StepRecord::rate)}, marks);
  out += chart(
      "Tokens per second", {curve_of("tokens/s", run, &StepRecord::tokens_per_second)}, marks);
  out += chart("MFU", {curve_of("mfu", run, &StepRecord::mfu)}, marks);
  Curve memory = curve_of("memory", run, &StepRecord::memory);
  for (auto& [step, bytes] : memory.points) {
    bytes /= 1024.0 * 1024.0 * 1024.0;
  }
  out += chart("Peak memory of rank 0, GiB", {memory}, marks);
  return out;
}

template <class Record>
HeatMap heat_map(const std::string& title,
                 const std::string& note,
                 const std::vector<Record>& records,
                 std::vector<double> Record::*values) {
  HeatMap map{.title = title, .note = note};
  for (const Record& record : records) {
    if (!(record.*values).empty()) {
      map.columns.emplace_back(static_cast<double>(record.step), record.*values);
    }
  }
  return map;
}

std::string layer_charts(const RunRecord& run) {
  std::string out = draw(heat_map("Alignment loss by layer and step",
                                  "Share of the teacher's attention output that the mixer misses.",
                                  run.steps,
                                  &StepRecord::layer_losses));
  out += draw(heat_map("Gate mean by layer and step",
                       "Weight of the far branch, mean over tokens and heads of held-out rows.",
                       run.validations,
                       &ValidationRecord::gate_means));
  out += draw(heat_map("Far branch's share by layer and step",
                       "What zeroing the layer's far branch changes of its heads, as a share of "
                       "their norm, on held-out rows.",
                       run.validations,
                       &ValidationRecord::far_shares));
  return out;
}

// The first, the middle and the last validation.
std::string position_chart(const RunRecord& run) {
  LineChart chart{.title = "Held-out KL by position in the document",
                  .note = "Positions count from 1, in buckets of powers of two."};
  std::vector<std::size_t> shown{0, run.validations.size() / 2, run.validations.size() - 1};
  shown.erase(std::unique(shown.begin(), shown.end()), shown.end());
  for (const std::size_t index : shown) {
    const ValidationRecord& validation = run.validations[index];
    Curve curve{.name = fmt::format("step {}", format_count(validation.step))};
    for (const auto& [position, kl] : validation.kl_by_position) {
      const auto word = std::ranges::find(chart.x_words, position);
      curve.points.emplace_back(static_cast<double>(word - chart.x_words.begin()), kl);
      if (word == chart.x_words.end()) {
        chart.x_words.push_back(position);
      }
    }
    chart.curves.push_back(std::move(curve));
  }
  for (std::string& word : chart.x_words) {
    word = word.substr(0, word.find('-'));
  }
  return draw(chart);
}

std::string row(std::string_view element, std::initializer_list<std::string> cells) {
  std::string out = "<tr>";
  for (const std::string& cell : cells) {
    out += fmt::format("<{0}>{1}</{0}>", element, escape_html(cell));
  }
  return out + "</tr>\n";
}

std::string checkpoint_table(const RunRecord& run) {
  std::string rows = row("th", {"step", "continues in", "after steps", "ranks", "size", "age"});
  for (const CheckpointRecord& one : run.checkpoints) {
    rows += row("td",
                {format_count(one.step),
                 one.stage == "done" ? "nothing: the end" : one.stage,
                 format_count(one.stage_step),
                 format_count(one.ranks),
                 format_bytes(one.bytes),
                 format_duration(one.age)});
  }
  return fmt::format("<div class=\"scroll\"><table>\n{}</table></div>\n", rows);
}

std::string event_table(const RunRecord& run) {
  std::string rows = row("th", {"step", "event"});
  const std::size_t first = run.events.size() - std::min(run.events.size(), kEvents);
  for (std::size_t i = run.events.size(); i > first; --i) {
    rows += row("td", {format_count(run.events[i - 1].step), run.events[i - 1].text});
  }
  return fmt::format("<div class=\"scroll\"><table class=\"words\">\n{}</table></div>\n", rows);
}

std::string section(std::string_view title, const std::string& content) {
  return content.empty() ? "" : fmt::format("<h2>{}</h2>\n{}", title, content);
}

std::string panels(const std::string& figures) {
  return figures.empty() ? "" : fmt::format("<div class=\"panels\">\n{}</div>\n", figures);
}

std::string page(const RunRecord& run) {
  const std::string name = escape_html(run.directory.lexically_normal().string());
  std::string body = fmt::format("<h1>{}</h1>\n", name);
  body += run.steps.empty() ? "<p class=\"quiet\">No step is logged yet.</p>\n"
                            : fmt::format("<p class=\"quiet\">last line {} before this page</p>\n",
                                          format_duration(run.age));
  body += facts(run);
  body += section("Training", panels(training_charts(run)));
  body += section("Layers", panels(layer_charts(run)));
  if (!run.validations.empty()) {
    body += section("Held-out rows", panels(position_chart(run)));
  }
  body +=
      section("Checkpoints",
              run.checkpoints.empty() ? "<p class=\"quiet\">none</p>\n" : checkpoint_table(run));
  body += section("Events", run.events.empty() ? "" : event_table(run));
  body += section("Configuration", fmt::format("<pre>{}</pre>\n", escape_html(run.configuration)));
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
      name,
      kReportStyle,
      body);
}

}  // namespace

void add_report_command(CLI::App& app, const CommandContext& context) {
  CLI::App* command = app.add_subcommand(
      "report", "Write a run as one HTML page: curves, layers, held-out rows, configuration");

  struct Options {
    std::string run, output;
  };

  const auto options = std::make_shared<Options>();
  command->add_option("run", options->run, "Run directory")->required();
  command->add_option(
      "--output", options->output, "Where to write the page; report.html of the run without it");
  command->callback([options, &context] {
    require_one_rank(context, "report");
    const RunRecord run = read_run(options->run);
    const std::string output =
        options->output.empty() ? (run.directory / "report.html").string() : options->output;
    write_file_atomically(output, page(run));
    fmt::print("{}\n", output);
  });
}

}  // namespace bifocal
