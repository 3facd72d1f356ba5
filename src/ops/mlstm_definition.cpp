// The mLSTM as written down: the recurrence, and its gradient from every weight of the quadratic
// form. Plain loops, no blocks, sums in double; slow on purpose.
#include <limits>

#include "ops/mlstm_gates.h"
#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

using Doubles = std::vector<double>;

template <class T>
Doubles to_doubles(const ConstTensorView& tensor) {
  const T* data = tensor.as<T>();
  return tensor.size() == 0 ? Doubles() : Doubles(data, data + tensor.size());
}

template <class T>
void store(const TensorView& tensor, const Doubles& values) {
  std::transform(
      values.begin(), values.end(), tensor.as<T>(), [](double x) { return static_cast<T>(x); });
}

// Everything in double; `at` functions give the first of head_dim numbers.
struct Problem {
  MlstmSizes sizes;
  Doubles q, k, v, i_gate, f_gate;
  Doubles c, n, m;  // the initial state
  std::vector<char> starts;

  std::int64_t dim() const { return sizes.head_dim; }

  std::int64_t q_at(std::int64_t t, std::int64_t head) const {
    return (t * sizes.heads + head) * sizes.head_dim;
  }

  std::int64_t k_at(std::int64_t t, std::int64_t state) const {
    return (t * sizes.states + state) * sizes.head_dim;
  }

  std::int64_t v_at(std::int64_t t, std::int64_t state) const {
    return (t * sizes.v_heads + state / sizes.holders()) * sizes.head_dim;
  }

  double gate(const Doubles& gates, std::int64_t t, std::int64_t state) const {
    return gates[static_cast<std::size_t>(t * sizes.states + state)];
  }
};

template <class T>
Problem read_problem(const MlstmInputs& in) {
  Problem p{.sizes = mlstm_sizes(in),
            .q = to_doubles<T>(in.q),
            .k = to_doubles<T>(in.k),
            .v = to_doubles<T>(in.v),
            .i_gate = to_doubles<T>(in.i_gate),
            .f_gate = to_doubles<T>(in.f_gate),
            .c = {},
            .n = {},
            .m = {},
            .starts = {}};
  const auto states = static_cast<std::size_t>(p.sizes.states);
  const auto dim = static_cast<std::size_t>(p.sizes.head_dim);
  if (in.initial) {
    p.c = to_doubles<T>(in.initial.c);
    p.n = to_doubles<T>(in.initial.n);
    p.m = to_doubles<T>(in.initial.m);
  } else {
    p.c.assign(states * dim * dim, 0.0);
    p.n.assign(states * dim, 0.0);
    p.m.assign(states, kEmpty);
  }
  if (p.sizes.tokens > 0) {
    const auto* start = in.starts.as<std::uint8_t>();
    p.starts.assign(start, start + p.sizes.tokens);
  }
  return p;
}

double dot_at(
    const Doubles& a, std::int64_t a_at, const Doubles& b, std::int64_t b_at, std::int64_t size) {
  return dot(a.data() + a_at, b.data() + b_at, size);
}

// One token of one state; c, n and m are updated.
void step(Problem& p, std::int64_t t, std::int64_t state) {
  const std::int64_t dim = p.dim();
  double& m = p.m[static_cast<std::size_t>(state)];
  // NOLINTNEXTLINE(bugprone-narrowing-conversions): clang-tidy names double to double
  const double before = p.starts[static_cast<std::size_t>(t)] != 0 ? kEmpty : m;
  const double carried = log_sigmoid(p.gate(p.f_gate, t, state)) + before;
  m = std::max(carried, p.gate(p.i_gate, t, state));
  const double forget = std::exp(carried - m);
  const double input = std::exp(p.gate(p.i_gate, t, state) - m);
  const double* k = p.k.data() + p.k_at(t, state);
  const double* v = p.v.data() + p.v_at(t, state);
  double* c = p.c.data() + state * dim * dim;
  double* n = p.n.data() + state * dim;
  for (std::int64_t a = 0; a < dim; ++a) {
    for (std::int64_t b = 0; b < dim; ++b) {
      c[a * dim + b] = forget * c[a * dim + b] + input * k[a] * v[b];
    }
    n[a] = forget * n[a] + input * k[a];
  }
}

void read(const Problem& p, std::int64_t t, std::int64_t head, double* h) {
  const std::int64_t dim = p.dim();
  const std::int64_t state = head / p.sizes.readers();
  const double* q = p.q.data() + p.q_at(t, head);
  const double normaliser = dot(q, p.n.data() + state * dim, dim) + kMlstmTiny;
  for (std::int64_t b = 0; b < dim; ++b) {
    double sum = 0;
    for (std::int64_t a = 0; a < dim; ++a) {
      sum += q[a] * p.c[static_cast<std::size_t>((state * dim + a) * dim + b)];
    }
    h[b] = sum / normaliser;
  }
}

template <class T>
void forward(const MlstmForward& op) {
  auto p = read_problem<T>(op.inputs);
  Doubles h(static_cast<std::size_t>(op.h.size()));
  for (std::int64_t t = 0; t < p.sizes.tokens; ++t) {
    for (std::int64_t state = 0; state < p.sizes.states; ++state) {
      step(p, t, state);
    }
    for (std::int64_t head = 0; head < p.sizes.heads; ++head) {
      read(p, t, head, h.data() + p.q_at(t, head));
    }
  }
  store<T>(op.h, h);
  if (op.final) {
    store<T>(op.final.c, p.c);
    store<T>(op.final.n, p.n);
    store<T>(op.final.m, p.m);
  }
}

struct Gradients {
  Doubles d_q, d_k, d_v, d_i, d_f, d_c, d_n;
};

// The log weights of one state: of token j (-1: the initial state) when read at token t.
class LogWeights {
 public:
  LogWeights(const Problem& p, std::int64_t state) : problem_(p), state_(state) {
    double m = p.m[static_cast<std::size_t>(state)];
    initial_m_ = m;
    double sum = 0;
    std::int64_t first = -1;
    for (std::int64_t t = 0; t < p.sizes.tokens; ++t) {
      const double log_decay = log_sigmoid(p.gate(p.f_gate, t, state));
      if (p.starts[static_cast<std::size_t>(t)] != 0) {
        m = kEmpty;
        sum = 0;
        first = t;
      }
      sum += log_decay;
      m = std::max(m + log_decay, p.gate(p.i_gate, t, state));
      m_.push_back(m);
      sum_.push_back(sum);
      first_.push_back(first);
    }
  }

  // First token that a read at t sees; -1 where it sees the initial state.
  std::int64_t first(std::int64_t t) const { return first_[static_cast<std::size_t>(t)]; }

  double weight(std::int64_t t, std::int64_t j) const {
    const auto at = static_cast<std::size_t>(t);
    if (j < 0) {
      return std::exp(sum_[at] + initial_m_ - m_[at]);
    }
    const double decay = sum_[at] - sum_[static_cast<std::size_t>(j)];
    return std::exp(decay + problem_.gate(problem_.i_gate, j, state_) - m_[at]);
  }

 private:
  const Problem& problem_;
  std::int64_t state_;
  double initial_m_;
  Doubles m_, sum_;
  std::vector<std::int64_t> first_;
};

// Gradients of the log weights of one state, summed over all reads seen so far: element 0 for the
// initial state, element j + 1 for token j.
using LogGradients = Doubles;

struct ReadGradient {
  const Doubles& h;
  const Doubles& d_h;
  LogGradients& sums;
};

struct FinalGradient {
  const Doubles& d_c;
  const Doubles& d_n;
  LogGradients& sums;
};

double& log_gradient(LogGradients& sums, std::int64_t j) {
  return sums[static_cast<std::size_t>(j + 1)];
}

// Adds the gradients of the read of `head` at t.
void differentiate_read(const Problem& p,
                        const LogWeights& logs,
                        std::int64_t t,
                        std::int64_t head,
                        const ReadGradient& read,
                        Gradients& g) {
  const std::int64_t dim = p.dim();
  const std::int64_t state = head / p.sizes.readers();
  const std::int64_t at = p.q_at(t, head);
  const double* q = p.q.data() + at;
  double normaliser = kMlstmTiny;
  for (std::int64_t j = logs.first(t); j <= t; ++j) {
    const double* key = j < 0 ? p.n.data() + state * dim : p.k.data() + p.k_at(j, state);
    normaliser += logs.weight(t, j) * dot(q, key, dim);
  }
  Doubles d_read(read.d_h.begin() + at, read.d_h.begin() + at + dim);
  scale_row(d_read.data(), 1 / normaliser, dim);
  const double delta = -dot_at(d_read, 0, read.h, at, dim);
  for (std::int64_t j = std::max<std::int64_t>(0, logs.first(t)); j <= t; ++j) {
    const std::int64_t key = p.k_at(j, state);
    const std::int64_t value = p.v_at(j, state);
    const double weight = logs.weight(t, j);
    const double product = dot_at(p.q, at, p.k, key, dim);
    const double d_product = weight * (dot_at(d_read, 0, p.v, value, dim) + delta);
    axpy(g.d_q.data() + at, d_product, p.k.data() + key, dim);
    axpy(g.d_k.data() + key, d_product, q, dim);
    axpy(g.d_v.data() + value, weight * product, d_read.data(), dim);
    log_gradient(read.sums, j) += product * d_product;
  }
  if (logs.first(t) < 0) {
    const double weight = logs.weight(t, -1);
    for (std::int64_t a = 0; a < dim; ++a) {
      const std::int64_t row = (state * dim + a) * dim;
      const auto feature = static_cast<std::size_t>(state * dim + a);
      const double d_q = weight * (dot_at(p.c, row, d_read, 0, dim) + p.n[feature] * delta);
      g.d_q[static_cast<std::size_t>(at + a)] += d_q;
      axpy(g.d_c.data() + row, weight * q[a], d_read.data(), dim);
      g.d_n[feature] += weight * q[a] * delta;
      log_gradient(read.sums, -1) += q[a] * d_q;
    }
  }
}

// Adds the gradients of the final state.
void differentiate_final(const Problem& p,
                         const LogWeights& logs,
                         std::int64_t state,
                         const FinalGradient& final,
                         Gradients& g) {
  const std::int64_t dim = p.dim();
  const std::int64_t last = p.sizes.tokens - 1;
  for (std::int64_t j = logs.first(last); j <= last; ++j) {
    const double weight = logs.weight(last, j);
    for (std::int64_t a = 0; a < dim; ++a) {
      const std::int64_t row = (state * dim + a) * dim;
      const auto feature = static_cast<std::size_t>(state * dim + a);
      if (j < 0) {
        axpy(g.d_c.data() + row, weight, final.d_c.data() + row, dim);
        g.d_n[feature] += weight * final.d_n[feature];
        log_gradient(final.sums, j) +=
            weight * (dot_at(final.d_c, row, p.c, row, dim) + final.d_n[feature] * p.n[feature]);
        continue;
      }
      const auto key = static_cast<std::size_t>(p.k_at(j, state) + a);
      const std::int64_t value = p.v_at(j, state);
      const double d_k = weight * (dot_at(final.d_c, row, p.v, value, dim) + final.d_n[feature]);
      g.d_k[key] += d_k;
      axpy(g.d_v.data() + value, weight * p.k[key], final.d_c.data() + row, dim);
      log_gradient(final.sums, j) += p.k[key] * d_k;
    }
  }
}

// With all reads at t and later in `sums`: every weight of an earlier token decays through t.
// Equal to the sum over the rest of the document of q . d_q - k . d_k, but not a difference.
void differentiate_decay(const Problem& p,
                         const LogWeights& logs,
                         std::int64_t t,
                         std::int64_t state,
                         const LogGradients& sums,
                         Gradients& g) {
  double through = 0;
  for (std::int64_t j = logs.first(t); j < t; ++j) {
    through += sums[static_cast<std::size_t>(j + 1)];
  }
  const auto gate = static_cast<std::size_t>(t * p.sizes.states + state);
  g.d_f[gate] = sigmoid(-p.f_gate[gate]) * through;
  g.d_i[gate] = sums[static_cast<std::size_t>(t + 1)];
}

template <class T>
void backward(const MlstmBackward& op) {
  const auto p = read_problem<T>(op.inputs);
  const auto h = to_doubles<T>(op.h);
  const auto d_h = to_doubles<T>(op.d_h);
  const auto zeros = [](const Doubles& like) { return Doubles(like.size(), 0.0); };
  Gradients g{.d_q = zeros(p.q),
              .d_k = zeros(p.k),
              .d_v = zeros(p.v),
              .d_i = zeros(p.i_gate),
              .d_f = zeros(p.f_gate),
              .d_c = zeros(p.c),
              .d_n = zeros(p.n)};
  const auto d_c = op.d_final_c ? to_doubles<T>(op.d_final_c) : zeros(p.c);
  const auto d_n = op.d_final_c ? to_doubles<T>(op.d_final_n) : zeros(p.n);
  if (p.sizes.tokens == 0) {
    g.d_c = d_c;
    g.d_n = d_n;
  }
  for (std::int64_t state = 0; state < p.sizes.states && p.sizes.tokens > 0; ++state) {
    const LogWeights logs(p, state);
    LogGradients sums(static_cast<std::size_t>(p.sizes.tokens + 1), 0.0);
    differentiate_final(p, logs, state, {.d_c = d_c, .d_n = d_n, .sums = sums}, g);
    const ReadGradient read{.h = h, .d_h = d_h, .sums = sums};
    for (std::int64_t t = p.sizes.tokens - 1; t >= 0; --t) {
      for (std::int64_t reader = 0; reader < p.sizes.readers(); ++reader) {
        differentiate_read(p, logs, t, state * p.sizes.readers() + reader, read, g);
      }
      differentiate_decay(p, logs, t, state, sums, g);
    }
  }
  store<T>(op.d_q, g.d_q);
  store<T>(op.d_k, g.d_k);
  store<T>(op.d_v, g.d_v);
  store<T>(op.d_i_gate, g.d_i);
  store<T>(op.d_f_gate, g.d_f);
  if (op.d_initial_c) {
    store<T>(op.d_initial_c, g.d_c);
    store<T>(op.d_initial_n, g.d_n);
  }
}

}  // namespace

void mlstm_definition(const MlstmForward& op) {
  dispatch_real("mlstm definition", op.h.dtype, [&](auto zero) { forward<decltype(zero)>(op); });
}

void mlstm_definition(const MlstmBackward& op) {
  dispatch_real("mlstm definition", op.d_q.dtype, [&](auto zero) { backward<decltype(zero)>(op); });
}

}  // namespace bifocal
