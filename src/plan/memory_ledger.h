// Counting in place of allocating: a dry run of a training step takes and returns what the real one
// does.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "core/dtype.h"
#include "core/memory.h"
#include "plan/parameter_table.h"

namespace bifocal {

// Largest bytes that live at once: in each region, and over all regions (not the regions' sum, for
// their peaks fall at different moments).
struct PeakBytes {
  std::array<std::int64_t, static_cast<std::size_t>(Region::count)> regions{};
  std::int64_t total = 0;

  std::int64_t of(Region region) const { return regions.at(static_cast<std::size_t>(region)); }
};

// The account that Memory would keep.
class Ledger {
 public:
  const PeakBytes& peak() const { return peak_; }

 private:
  friend class Held;
  void change(Region region, std::int64_t bytes);

  std::array<std::int64_t, static_cast<std::size_t>(Region::count)> current_{};
  std::int64_t total_ = 0;
  PeakBytes peak_;
};

// Tensors that live and die together. Must not outlive its ledger.
class Held {
 public:
  explicit Held(Ledger& ledger) : ledger_(&ledger) {}

  ~Held() { release(); }

  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Held(Held&& other) noexcept;
  Held& operator=(Held&& other) noexcept;

  // One tensor, rounded up to whole blocks as Memory does.
  void add(Region region, DType dtype, std::int64_t elements);
  void release();

  // Whether any tensor was added since construction or release().
  explicit operator bool() const { return tensors_ > 0; }

 private:
  Ledger* ledger_;
  std::array<std::int64_t, static_cast<std::size_t>(Region::count)> bytes_{};
  std::int64_t tensors_ = 0;
};

// The memory of Weights (model/weights.h).
class DryWeights {
 public:
  struct Options {
    Region region = Region::weights;
    std::int64_t ranks = 1;  // of the group that shares the units
    bool is_resident = false;
    DType storage = DType::f32;
    DType compute = DType::f32;
    bool is_trained = false;
  };

  // table must outlive it.
  DryWeights(Ledger& ledger, const ParameterTable& table, const Options& options);

  const ParameterTable& table() const { return *table_; }

  void acquire(std::int64_t unit, std::int64_t next = -1);
  void release(std::int64_t unit);

 private:
  struct InFlight {
    explicit InFlight(Ledger& ledger) : stored(ledger), converted(ledger) {}

    Held stored, converted;
    int users = 0;
  };

  InFlight& start(std::int64_t unit);
  std::int64_t whole_size(std::int64_t unit) const;

  Ledger* ledger_;
  const ParameterTable* table_;
  Options options_;
  Held units_;
  std::map<std::int64_t, InFlight> in_flight_;
};

// The memory of Gradients (model/gradients.h).
class DryGradients {
 public:
  // ranks: all that share the gradients. table must outlive it.
  DryGradients(Ledger& ledger, const ParameterTable& table, std::int64_t ranks, DType dtype);

  void open(std::int64_t unit);
  void close(std::int64_t unit);
  void finish();

 private:
  Ledger* ledger_;
  const ParameterTable* table_;
  std::int64_t ranks_;
  DType dtype_;
  Held parts_;
  std::map<std::int64_t, Held> open_;
  Held closing_;
};

// Elements of a unit's whole buffer, every rank's part with its padding.
std::int64_t padded_unit_size(const ParameterTable& table, std::int64_t unit, std::int64_t ranks);

}  // namespace bifocal
