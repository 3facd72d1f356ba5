// Samples, the table and the results file.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/bench.h"
#include "cli/version.h"
#include "core/error.h"
#include "core/file.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

// How this process was started, as a shell would take it where no word needs quotes.
std::string command_line() {
  std::string text = read_file("/proc/self/cmdline");
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  std::ranges::replace(text, '\0', ' ');
  return text;
}

bool is_time(const std::string& unit) {
  return unit == "s" || unit == "ms";
}

bool lower_is_better(const std::string& unit) {
  return is_time(unit) || unit == "bytes";
}

double seconds_of(const std::string& unit) {
  return unit == "ms" ? 1e-3 : 1.0;
}

// Five digits are enough for every unit but bytes and tokens/s, which stay whole.
std::string format_value(double value) {
  if (std::abs(value) >= 1e5) {
    return fmt::format("{:.4g}", value);
  }
  return fmt::format("{:.{}f}", value, value >= 1000.0 ? 0 : (value >= 10.0 ? 2 : 4));
}

}  // namespace

void BenchSettings::add_to(CLI::App& command) {
  command.add_option("--json", json, "File to write the results to")->type_name("FILE");
  command
      .add_option("--peer", peer, "Results file with a peer's figures, set beside ours by row name")
      ->type_name("FILE");
  command.add_option("--machine", machine, "Machine, as the results file names it");
  command.add_option("--notes", notes, "Remarks for the results file");
  command
      .add_option("--peak-tflops", peak_tflops, "Matrix products that the device reaches, TFLOP/s")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command.add_option("--bandwidth-tbs", bandwidth_tbs, "Memory bandwidth that it reaches, TB/s")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command.add_option("--warmups", warmups, "Runs that are not counted")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command.add_option("--repeats", repeats, "Runs that are counted; the median is reported")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
}

double median(std::vector<double> values) {
  BIFOCAL_ASSERT(!values.empty());
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

BenchRow time_row(const std::string& name,
                  const std::string& unit,
                  std::vector<double> seconds,
                  const OpCost& cost,
                  std::optional<double> floor_seconds) {
  const double scale = 1.0 / seconds_of(unit);
  const auto [low, high] = std::ranges::minmax(seconds);
  BenchRow row{.name = name,
               .unit = unit,
               .ours = scale * median(seconds),
               .low = scale * low,
               .high = scale * high,
               .samples = static_cast<std::int64_t>(seconds.size()),
               .cost = cost};
  if (floor_seconds) {
    row.floor = scale * *floor_seconds;
  }
  return row;
}

BenchReport::BenchReport(const BenchSettings& settings, const std::string& what, bool speaks)
    : settings_(settings), what_(what), speaks_(speaks) {
  if (settings_.machine.empty()) {
    settings_.machine = fmt::format("{} CPU threads", std::thread::hardware_concurrency());
  }
  if (settings.peer.empty()) {
    return;
  }
  const Json file = Json::parse(read_file(settings.peer), nullptr, false);
  BIFOCAL_REQUIRE(file.is_object() && file.contains("rows") && file["rows"].is_array(),
                  "[bench] {}: wanted an object with an array of rows: it is no results file",
                  settings.peer);
  for (const Json& row : file["rows"]) {
    const bool is_peer = row.is_object() && row.value("name", Json()).is_string() &&
                         row.value("unit", Json()).is_string() &&
                         row.value("peer", Json()).is_number();
    BIFOCAL_REQUIRE(is_peer,
                    "[bench] {}: wanted rows with name, unit and peer, got {}",
                    settings.peer,
                    row.dump());
    peers_.push_back({row["name"], row["unit"], row.value("peer_name", ""), row["peer"]});
  }
}

std::optional<double> BenchReport::peer_of(const BenchRow& row, std::string& name) const {
  for (const Peer& peer : peers_) {
    if (peer.name != row.name) {
      continue;
    }
    name = peer.peer_name;
    if (is_time(peer.unit) && is_time(row.unit)) {
      return peer.value * seconds_of(peer.unit) / seconds_of(row.unit);
    }
    BIFOCAL_REQUIRE(peer.unit == row.unit,
                    "[bench] {}: row {} is in {}, wanted {}",
                    settings_.peer,
                    peer.name,
                    peer.unit,
                    row.unit);
    return peer.value;
  }
  return std::nullopt;
}

void BenchReport::note(std::string_view line) const {
  if (speaks_) {
    fmt::print("{}\n", line);
    std::fflush(stdout);
  }
}

void BenchReport::print(const BenchRow& row, const std::optional<double>& peer) {
  if (!has_header_) {
    has_header_ = true;
    fmt::print("{:<36}{:>10} {:<9}{:>10}{:>10}{:>10}{:>8}{:>10}{:>8}{:>10}{:>8}\n",
               "what",
               "median",
               "unit",
               "low",
               "high",
               "TFLOP/s",
               "TB/s",
               "floor",
               "of it",
               "peer",
               "times");
  }
  std::string line = fmt::format("{:<36}{:>10} {:<9}{:>10}{:>10}",
                                 row.name,
                                 format_value(row.ours),
                                 row.unit,
                                 format_value(row.low),
                                 format_value(row.high));
  const double seconds = row.ours * seconds_of(row.unit);
  const bool has_rate = is_time(row.unit) && seconds > 0.0;
  const auto rate = [&](double count) {
    return has_rate && count > 0.0 ? fmt::format("{:.3g}", count / seconds / 1e12)
                                   : std::string("-");
  };
  line += fmt::format("{:>10}{:>8}", rate(row.cost.flop), rate(row.cost.bytes));
  // How many times as good as the peer; the share of the floor that is reached.
  const auto better = [&](double other) {
    return lower_is_better(row.unit) ? other / row.ours : row.ours / other;
  };
  line += row.floor ? fmt::format("{:>10}{:>8.2f}", format_value(*row.floor), better(*row.floor))
                    : fmt::format("{:>10}{:>8}", "-", "-");
  line += peer ? fmt::format("{:>10}{:>8.2f}", format_value(*peer), better(*peer))
               : fmt::format("{:>10}{:>8}", "-", "-");
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void BenchReport::add(const BenchRow& row) {
  if (!speaks_) {
    return;
  }
  std::string peer_name;
  const std::optional<double> peer = peer_of(row, peer_name);
  print(row, peer);
  if (settings_.json.empty()) {
    return;
  }
  Json json{{"name", row.name}, {"unit", row.unit}, {"ours", row.ours}};
  if (peer) {
    json["peer"] = *peer;
    json["peer_name"] = peer_name;
  }
  if (row.floor) {
    json["floor"] = *row.floor;
  }
  json["samples"] = row.samples;
  json["low"] = row.low;
  json["high"] = row.high;
  if (is_time(row.unit) && row.ours > 0.0) {
    const double seconds = row.ours * seconds_of(row.unit);
    if (row.cost.flop > 0.0) {
      json["flop_per_second"] = row.cost.flop / seconds;
    }
    if (row.cost.bytes > 0.0) {
      json["bytes_per_second"] = row.cost.bytes / seconds;
    }
  }
  rows_ += (rows_.empty() ? "" : ",\n  ") + json.dump();
  const Json head{{"what", what_},
                  {"command", command_line()},
                  {"commit", commit_text()},
                  {"date", fmt::format("{:%Y-%m-%d}", std::chrono::system_clock::now())},
                  {"machine", settings_.machine},
                  {"notes", settings_.notes}};
  std::string text = head.dump(1);
  text.resize(text.size() - 2);  // "\n}"
  write_file_atomically(settings_.json,
                        fmt::format("{},\n \"rows\": [\n  {}\n ]\n}}\n", text, rows_));
}

std::vector<double> measure(Stream& stream,
                            std::int64_t warmups,
                            std::int64_t repeats,
                            const std::function<void()>& run) {
  for (std::int64_t i = 0; i < warmups; ++i) {
    run();
  }
  const std::unique_ptr<StreamClock> clock = make_clock(stream);
  clock->mark();
  for (std::int64_t i = 0; i < repeats; ++i) {
    run();
    clock->mark();
  }
  return clock->take();
}

}  // namespace bifocal
