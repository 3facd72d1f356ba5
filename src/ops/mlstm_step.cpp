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
                std::int64_t sequence,
                std::int64_t state) {
  const std::int64_t at = sequence * s.states + state;
  const std::int64_t readers = s.heads / s.states;
  const std::int64_t first_head = sequence * s.heads + state * readers;
  const std::int64_t v_head = sequence * s.v_heads + state / (s.states / s.v_heads);
  const T* q = op.q.as<T>() + first_head * s.dim;
  const T* k = op.k.as<T>() + at * s.dim;
  const T* v = op.v.as<T>() + v_head * s.dim;
  T* c = op.c.as<T>() + at * s.dim * s.dim;
  T* n = op.n.as<T>() + at * s.dim;
  T* h = op.h.as<T>() + first_head * s.dim;
  T& m = op.m.as<T>()[at];
  const auto i_gate = static_cast<double>(op.i_gate.as<T>()[at]);
  const double carried =
      log_sigmoid(static_cast<double>(op.f_gate.as<T>()[at])) + static_cast<double>(m);
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
  const std::int64_t batch = op.k.shape[0];
  const auto* active = op.active ? op.active.as<std::uint8_t>() : nullptr;
  const std::int64_t work = 1 + s.dim * s.dim * (1 + s.heads / s.states) / 8;
  parallel_ranges(batch * s.states, 1, work, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t sequence = item / s.states;
      const std::int64_t state = item % s.states;
      if (active == nullptr || active[sequence] != 0) {
        step_state<T>(op, s, sequence, state);
        continue;
      }
      const std::int64_t size = s.heads / s.states * s.dim;
      std::fill_n(op.h.as<T>() + item * size, size, T{0});
    }
  });
}

}  // namespace

void run(CpuStream& /*stream*/, const MlstmStep& op) {
  dispatch_real("mlstm step", op.h.dtype, [&](auto zero) { step<decltype(zero)>(op); });
}

}  // namespace bifocal
