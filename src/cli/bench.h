// What the `bifocal bench` commands share: samples of time, a table with floors and peers, the
// results file, and models of known shape.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "config/model_config.h"
#include "data/row.h"
#include "model/context.h"
#include "ops/cost.h"

namespace CLI {
class App;
}

namespace bifocal {

// Options of every bench command.
struct BenchSettings {
  std::string json;  // file to write; empty: none
  std::string peer;  // file whose rows name a peer's figures; empty: none
  std::string machine;
  std::string notes;
  double peak_tflops = 790.0;
  double bandwidth_tbs = 4.3;
  std::int64_t warmups = 3;
  std::int64_t repeats = 10;

  void add_to(CLI::App& command);

  DeviceRates rates() const { return {.flop = peak_tflops * 1e12, .bytes = bandwidth_tbs * 1e12}; }
};

// One measured figure, in `unit`.
struct BenchRow {
  std::string name;
  std::string unit;
  double ours = 0.0;
  double low = 0.0, high = 0.0;
  std::int64_t samples = 1;
  std::optional<double> floor;  // nobody does better
  OpCost cost;                  // for FLOP/s and bytes/s where the unit is a time
};

// A row of times: median, least and largest. unit: "s" or "ms".
BenchRow time_row(const std::string& name,
                  const std::string& unit,
                  std::vector<double> seconds,
                  const OpCost& cost = {},
                  std::optional<double> floor_seconds = {});

// The median of at least one value.
double median(std::vector<double> values);

// Prints each row as it comes and keeps the results file complete after each.
class BenchReport {
 public:
  // what: "bench ops". speaks: whether this rank prints and writes. Throws Error for a peer file
  // that cannot be read, before anything is measured.
  BenchReport(const BenchSettings& settings, const std::string& what, bool speaks);

  void add(const BenchRow& row);

  // A line between rows.
  void note(std::string_view line) const;

 private:
  struct Peer {
    std::string name, unit, peer_name;
    double value;
  };

  void print(const BenchRow& row, const std::optional<double>& peer);
  std::optional<double> peer_of(const BenchRow& row, std::string& name) const;

  BenchSettings settings_;
  std::string what_;
  bool speaks_;
  bool has_header_ = false;
  std::vector<Peer> peers_;
  std::string rows_;  // JSON array so far, without brackets
};

// Seconds of `repeats` runs after `warmups`, each between two marks of the stream.
std::vector<double> measure(Stream& stream,
                            std::int64_t warmups,
                            std::int64_t repeats,
                            const std::function<void()>& run);

// "qwen3-4b", "qwen3.5-4b" (its decoder's shape with an attention layer everywhere), "tiny", or the
// path of a config.json or of its directory. Full attention in every layer.
ModelConfig bench_model(const std::string& name);

// "qwen3_4b", "qwen35_4b": the model in names of rows.
std::string model_label(const std::string& name);

// "bifocal", "swa", "teacher": the student in names of rows.
std::string student_label(const std::string& preset);

// 1024 is "1k", 131072 "128k", 1000 "1000".
std::string length_label(std::int64_t tokens);

// Documents that fill a row; `length` 0: one.
std::vector<std::int64_t> document_lengths(std::int64_t row_tokens, std::int64_t length);

// A row of such documents with random ids, every token with a successor kept.
Row random_bench_row(const std::vector<std::int64_t>& documents,
                     std::int64_t vocabulary,
                     std::uint64_t seed);

}  // namespace bifocal
