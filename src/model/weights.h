// Storage of a model's parameters over ranks: parts that are always held, whole units when they are
// used.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "model/context.h"
#include "parallel/communicator.h"
#include "plan/parameter_table.h"

namespace bifocal {

// Units of a ParameterTable, each cut into group.size() equal parts. A rank always holds its part;
// whole units in the compute type are either resident (replicated weights) or gathered on demand,
// the next one while the present one is in use. The part of a resident unit lies inside the whole.
// A trained model whose storage is bfloat16 has float32 masters beside its parts: they are what is
// updated, saved and loaded, the parts are their rounding.
class Weights {
 public:
  enum class Placement : std::uint8_t { replicated, sharded };

  struct Options {
    Placement placement = Placement::replicated;
    DType storage = DType::f32;  // of parts; must be context.dtype when replicated
    Region region = Region::weights;
    bool is_trained = false;
  };

  Weights(Context context,
          const ParameterTable& table,
          Communicator& group,
          const Options& options);

  const ParameterTable& table() const { return *table_; }

  Communicator& group() const { return *group_; }

  // This rank's part of a unit, [part_size], padding included.
  TensorView part(std::int64_t unit) const;

  bool has_masters() const { return !masters_.empty(); }

  // What is updated of this rank's part of a unit: its master, else the part itself.
  TensorView master(std::int64_t unit) const;
  std::vector<TensorView> masters() const;

  // After masters have changed: rounds them into the parts.
  void round_masters();

  // Whether every unit lies whole on this rank at all times: replicated, or over a group of one.
  bool is_whole() const { return resident() || group_->size() == 1; }

  // The whole unit in the storage type, flat, padding included. Needs is_whole().
  ConstTensorView whole(std::int64_t unit) const;

  // Calls function(parameter, first element, piece) for each piece of a parameter inside this
  // rank's masters. The pieces lie where the model does.
  using Visit = std::function<void(const Parameter&, std::int64_t, const TensorView&)>;
  void for_each_piece(const Visit& function) const;

  // The whole unit in the compute type, flat. Sharded: collective over the group, all ranks in the
  // same order; starts the gather of `next` (-1: none). Valid until release(unit).
  ConstTensorView acquire(std::int64_t unit, std::int64_t next = -1);
  void release(std::int64_t unit);

  // After parts have changed: gathers resident units again. Collective where replicated.
  void share();

 private:
  struct InFlight {
    Tensor stored;  // whole unit in the storage type
    Tensor whole;   // in the compute type, where that differs
    Pending gather;
    int users = 0;
  };

  bool resident() const { return options_.placement == Placement::replicated; }

  void start(std::int64_t unit);

  Context context_;
  const ParameterTable* table_;
  Communicator* group_;
  Options options_;
  std::vector<Tensor> units_;    // replicated: whole units; sharded: parts
  std::vector<Tensor> masters_;  // [part_size]; none where the parts are their own masters
  std::map<std::int64_t, InFlight> in_flight_;
};

// One piece of a parameter inside a flat range of its unit.
struct ParameterPiece {
  const Parameter* parameter = nullptr;
  std::int64_t first = 0;   // element of the parameter
  std::int64_t offset = 0;  // element of the range
  std::int64_t count = 0;
};

// The pieces of parameters in elements [begin, end) of a unit, in order.
std::vector<ParameterPiece> pieces_in(const ParameterTable& table,
                                      std::int64_t unit,
                                      std::int64_t begin,
                                      std::int64_t end);

}  // namespace bifocal
