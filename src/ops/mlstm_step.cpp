// One token of the mLSTM for each sequence of a batch: what generation runs.
#include "ops/mlstm_gates.h"
#include "ops/vector_math.h"

namespace bifocal {

namespace {

struct StepSizes {
  std::int64_t heads, states, v_heads, dim;
};

// The state's rows are read once: each is decayed, written and added to every reader's sums.
template <class T>
void step_state(const MlstmStep& op,
                const StepSizes& s,
                std::int64_t row_index,
                std::int64_t state) {
  const std::int64_t in = row_index * s.states + state;
  const std::int64_t at = op.sequences.as<std::int32_t>()[row_index] * s.states + state;
  const std::int64_t readers = s.heads / s.states;
  const std::int64_t first_head = row_index * s.heads + state * readers;
  const std::int64_t v_head = row_index * s.v_heads + state / (s.states / s.v_heads);
  const T* q = op.q.as<T>() + first_head * s.dim;
  const T* k = op.k.as<T>() + in * s.dim;
  const T* v = op.v.as<T>() + v_head * s.dim;
  T* c = op.c.as<T>() + at * s.dim * s.dim;
  T* n = op.n.as<T>() + at * s.dim;
  T* h = op.h.as<T>() + first_head * s.dim;
  T& m = op.m.as<T>()[at];
  const auto i_gate = static_cast<double>(op.i_gate.as<T>()[in]);
  const double carried =
      log_sigmoid(static_cast<double>(op.f_gate.as<T>()[in])) + static_cast<double>(m);
  // Rounded before it is used, so that C and n stand at the scale of the m that is stored.
  m = static_cast<T>(std::max(carried, i_gate));
  const auto forget = static_cast<T>(std::exp(carried - static_cast<double>(m)));
  const auto input = static_cast<T>(std::exp(i_gate - static_cast<double>(m)));
  std::fill_n(h, readers * s.dim, T{0});
  for (std::int64_t feature = 0; feature < s.dim; ++feature) {
    T* row = c + feature * s.dim;
    const T write = input * k[feature];
    for (std::int64_t i = 0; i < s.dim; ++i) {
      row[i] = forget * row[i] + write * v[i];
    }
    n[feature] = forget * n[feature] + write;
    for (std::int64_t reader = 0; reader < readers; ++reader) {
      axpy(h + reader * s.dim, q[reader * s.dim + feature], row, s.dim);
    }
  }
  for (std::int64_t reader = 0; reader < readers; ++reader) {
    const T normaliser = dot(q + reader * s.dim, n, s.dim) + static_cast<T>(kMlstmTiny);
    scale_row(h + reader * s.dim, T{1} / normaliser, s.dim);
  }
}

template <class T>
void step(const MlstmStep& op) {
  const StepSizes s{.heads = op.q.shape[1],
                    .states = op.k.shape[1],
                    .v_heads = op.v.shape[1],
                    .dim = op.k.shape[2]};
  const std::int64_t rows = op.k.shape[0];
  const std::int64_t work = 1 + s.dim * s.dim * (1 + s.heads / s.states) / 8;
  parallel_ranges(rows * s.states, 1, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      step_state<T>(op, s, item / s.states, item % s.states);
    }
  });
}

}  // namespace

void run(CpuStream& /*stream*/, const MlstmStep& op) {
  const auto* sequences = op.sequences.as<std::int32_t>();
  for (std::int64_t row = 0; row < op.sequences.size(); ++row) {
    BIFOCAL_REQUIRE(sequences[row] >= 0 && sequences[row] < op.m.shape[0],
                    "[mlstm step] wanted sequences below {}, got {}: name those that have a state",
                    op.m.shape[0],
                    sequences[row]);
  }
  dispatch_real("mlstm step", op.h.dtype, [&](auto zero) { step<decltype(zero)>(op); });
}

}  // namespace bifocal
