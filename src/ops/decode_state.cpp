// Steps of sequences on the CPU.
#include "ops/decode_state.h"

#include <algorithm>

namespace bifocal {

void StepBegin::check() const {
  const char* where = "step_begin";
  const Shape rows{sequences.shape[0]};
  const Shape all{state.token.shape[0]};
  require_tensor(where, "sequences", sequences, DType::i32, rows);
  require_tensor(where, "ids", ids, DType::i32, rows);
  require_tensor(where, "positions", positions, DType::i32, rows);
  require_tensor(where, "streams", streams, DType::i64, rows);
  require_tensor(where, "indices", indices, DType::i64, rows);
  require_tensor(where, "state.token", state.token, DType::i32, all);
  require_tensor(where, "state.position", state.position, DType::i32, all);
  require_tensor(where, "state.stream", state.stream, DType::i64, all);
  require_tensor(where, "state.drawn", state.drawn, DType::i64, all);
}

void StepEnd::check() const {
  const Shape rows{sequences.shape[0]};
  require_tensor("step_end", "sequences", sequences, DType::i32, rows);
  require_tensor("step_end", "ids", ids, DType::i32, rows);
  require_tensor("step_end", "token", token, DType::i32, {token.shape[0]});
}

void CachePlaces::check() const {
  const Shape rows{positions.shape[0]};
  require_tensor("cache_places", "positions", positions, DType::i32, rows);
  require_tensor("cache_places", "places", places, DType::i32, rows);
  require_tensor("cache_places", "lengths", lengths, DType::i32, rows);
  BIFOCAL_REQUIRE(window >= 0 && pinned >= 0,
                  "[cache_places] wanted a window and pinned tokens of 0 or more, got {} and {}",
                  window,
                  pinned);
}

void run(CpuStream&, const StepBegin& op) {
  for (std::int64_t row = 0; row < op.sequences.size(); ++row) {
    const std::int32_t sequence = op.sequences.as<std::int32_t>()[row];
    op.ids.as<std::int32_t>()[row] = op.state.token.as<std::int32_t>()[sequence];
    op.positions.as<std::int32_t>()[row] = op.state.position.as<std::int32_t>()[sequence]++;
    op.streams.as<std::int64_t>()[row] = op.state.stream.as<std::int64_t>()[sequence];
    op.indices.as<std::int64_t>()[row] = op.state.drawn.as<std::int64_t>()[sequence]++;
  }
}

void run(CpuStream&, const StepEnd& op) {
  for (std::int64_t row = 0; row < op.sequences.size(); ++row) {
    const std::int32_t sequence = op.sequences.as<std::int32_t>()[row];
    op.token.as<std::int32_t>()[sequence] = op.ids.as<std::int32_t>()[row];
  }
}

void run(CpuStream&, const CachePlaces& op) {
  for (std::int64_t row = 0; row < op.positions.size(); ++row) {
    const std::int64_t token = op.positions.as<std::int32_t>()[row];
    const std::int64_t most = op.window == 0 ? token + 1 : op.window + op.pinned;
    op.places.as<std::int32_t>()[row] =
        static_cast<std::int32_t>(cache_place(token, op.window, op.pinned));
    op.lengths.as<std::int32_t>()[row] = static_cast<std::int32_t>(std::min(token + 1, most));
  }
}

}  // namespace bifocal
