// Losses on logits: a block takes a row, reads it once for the statistics of both softmaxes and
// once more, backwards, for loss and gradient, so that what was read last is still in the cache.
#include <cmath>
#include <limits>

#include "kernels/cuda_stream.h"
#include "kernels/launch.cuh"
#include "kernels/tensor_core.cuh"
#include "kernels/warp.cuh"
#include "ops/distill_loss.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "distill_loss";
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 2;          // 16-byte loads of each tensor that a thread has in flight
constexpr float kLowest = -1e30F;  // below all logits; its differences stay finite
constexpr float kLog2E = 1.44269504F;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kNoId = std::numeric_limits<int>::max();
constexpr double kLn2 = 0.69314718055994530942;

template <class In, class Out>
struct Loss {
  Out* d_student;  // may be student
  double* kl;
  double* ce;
  std::uint8_t* agree;
  const In* student;
  const In* teacher;
  const std::int32_t* next;
  const double* kl_weight;
  const double* ce_weight;
  std::int64_t vocabulary;
  double temperature;
};

__device__ inline float block_max(float x, float* shared) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    x = fmaxf(x, shared[warp]);
  }
  return x;
}

__device__ inline int block_min(int x, int* shared) {
  x = __reduce_min_sync(kAllLanes, x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    x = min(x, shared[warp]);
  }
  return x;
}

// In a fixed order.
__device__ inline double block_sum(double x, double* shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = x;
  }
  __syncthreads();
  double sum = 0.0;
  for (int warp = 0; warp < kWarps; ++warp) {
    sum += shared[warp];
  }
  return sum;
}

// A thread's part of a row: of every chunk kLoads groups of N ids, kThreads groups apart.
template <int N>
struct Chunks {
  static constexpr int kSize = kLoads * N;
  static constexpr int kGroups = kLoads * kThreads;

  int groups;  // of the row
  int count;   // chunks of the row

  explicit __device__ Chunks(std::int64_t vocabulary)
      : groups(static_cast<int>(vocabulary / N)), count((groups + kGroups - 1) / kGroups) {}

  static __device__ int group(int chunk, int load) {
    return chunk * kGroups + load * kThreads + static_cast<int>(threadIdx.x);
  }

  // Ids past the row's end read as kLowest, whose probability is 0.
  template <class In>
  __device__ void load(float (&x)[kSize], const In* row, int chunk) const {
    Vector<In, N> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = load_vector<N>(row, min(group(chunk, i), groups - 1));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool present = group(chunk, i) < groups;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        x[i * N + j] = present ? load_float(loaded[i].element[j]) : kLowest;
      }
    }
  }

  template <class Out>
  __device__ void store(Out* row, int chunk, const float (&x)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (group(chunk, i) < groups) {
        Vector<Out, N> out;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          out.element[j] = store_as<Out>(x[i * N + j]);
        }
        store_vector<N>(row, group(chunk, i), out);
      }
    }
  }

  // The lowest id of this thread's part of a chunk whose logit is `value`.
  template <class In>
  __device__ int find(const In* row, int chunk, float value) const {
    for (int i = 0; i < kLoads; ++i) {
      for (int j = 0; j < N && group(chunk, i) < groups; ++j) {
        const int id = group(chunk, i) * N + j;
        if (load_float(row[id]) == value) {
          return id;
        }
      }
    }
    return kNoId;
  }
};

// The statistics of a softmax at the loss's temperature, and at 1 where kPlain: of a thread's part,
// then of the row.
template <bool kPlain>
struct Softmax {
  float largest = kLowest;
  int chunk = 0;  // the first that held it
  double sum = 0.0;
  double plain_sum = 0.0;

  // Few chunks hold a new largest logit, so that almost all sums go without rescaling. Sums of a
  // chunk in float32, of the row in double.
  template <int kSize>
  __device__ void add(const float (&x)[kSize], int place, float scale) {
    float most = x[0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) {
      most = fmaxf(most, x[i]);
    }
    if (most > largest) {
      rescale(most, scale);
      chunk = place;
    }
    float part = 0.0F;
    float plain_part = 0.0F;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      part += exp2_fast((x[i] - largest) * scale);
      if constexpr (kPlain) {
        plain_part += exp2_fast((x[i] - largest) * kLog2E);
      }
    }
    sum += static_cast<double>(part);
    plain_sum += static_cast<double>(plain_part);
  }

  __device__ void rescale(float to, float scale) {
    sum *= static_cast<double>(exp2_fast((largest - to) * scale));
    if constexpr (kPlain) {
      plain_sum *= static_cast<double>(exp2_fast((largest - to) * kLog2E));
    }
    largest = to;
  }

  __device__ void reduce(float row_largest, float scale, double* shared) {
    rescale(row_largest, scale);
    sum = block_sum(sum, shared);
    plain_sum = kPlain ? block_sum(plain_sum, shared) : sum;
  }
};

// What an id contributes to the loss and its gradient, in float32 from the logits' distance to the
// largest ones. q: student, p: teacher, r = log q - log p. As on the CPU, q - p = p (e^r - 1) and
// p (e^r - 1 - r), whose sum is the divergence, keep their digits where r is small.
template <bool kTeacher, bool kPlain>
struct Terms {
  float q_largest, q_log, plain_log;  // logarithms to base 2 of the sums
  float p_largest, p_log;
  float log_ratio;    // of the normalisers: r = beta (student - teacher) - log_ratio
  float beta, scale;  // 1 / temperature, and that to base 2
  float kl_factor, ce_factor;

  __device__ float slope(float student, float teacher, float& divergence) const {
    const float from_largest = student - q_largest;
    float result = 0.0F;
    float plain = 0.0F;
    if constexpr (kTeacher) {
      const float q = exp2_fast(fmaf(from_largest, scale, -q_log));
      const float p = exp2_fast(fmaf(teacher - p_largest, scale, -p_log));
      const float r = fmaf(student - teacher, beta, -log_ratio);
      float ratio = 0.00138143194F;  // (e^r - 1 - r) / r^2 near 0
      ratio = fmaf(ratio, r, 0.00836885162F);
      ratio = fmaf(ratio, r, 0.0416684002F);
      ratio = fmaf(ratio, r, 0.166665196F);
      ratio = fmaf(ratio, r, 0.49999994F);
      const float excess = r * r * ratio;
      const bool small = fabsf(r) < 0.34F;
      divergence += small ? p * excess : fmaf(-p, r, q - p);
      result = kl_factor * (small ? p * (r + excess) : q - p);
      plain = q;
    }
    if constexpr (!kTeacher || kPlain) {
      plain = exp2_fast(fmaf(from_largest, kLog2E, -plain_log));
    }
    return fmaf(ce_factor, plain, result);
  }
};

struct Shared {
  double sums[kWarps];
  float largest[kWarps];
  int ids[kWarps];
};

template <class T>
__device__ T* row_of(T* base, std::int64_t row, std::int64_t size) {
  return base == nullptr ? nullptr : base + row * size;
}

// The lowest id of the row's largest logit.
template <int N, class In, bool kPlain>
__device__ int choice(const Chunks<N>& chunks,
                      const In* row,
                      const Softmax<kPlain>& own,
                      float row_largest,
                      int* shared) {
  const int found = own.largest == row_largest ? chunks.find(row, own.chunk, row_largest) : kNoId;
  return block_min(found, shared);
}

// The first reading: statistics of this thread's part.
template <int N, bool kTeacher, bool kPlain, class In>
__device__ void collect(const Chunks<N>& chunks,
                        Softmax<kPlain>& q,
                        Softmax<false>& p,
                        const In* student,
                        const In* teacher,
                        float scale) {
  for (int chunk = 0; chunk < chunks.count; ++chunk) {
    float x[Chunks<N>::kSize];
    float y[Chunks<N>::kSize];
    chunks.load(x, student, chunk);
    if constexpr (kTeacher) {
      chunks.load(y, teacher, chunk);
    }
    q.add(x, chunk, scale);
    if constexpr (kTeacher) {
      p.add(y, chunk, scale);
    }
  }
}

// The second reading. Returns this thread's part of the divergence.
template <int N, bool kTeacher, bool kPlain, class In, class Out>
__device__ double apply(const Chunks<N>& chunks,
                        const Terms<kTeacher, kPlain>& terms,
                        Out* gradient,
                        const In* student,
                        const In* teacher) {
  double divergence = 0.0;
  for (int chunk = chunks.count - 1; chunk >= 0; --chunk) {
    float x[Chunks<N>::kSize];
    float y[Chunks<N>::kSize] = {};
    chunks.load(x, student, chunk);
    if constexpr (kTeacher) {
      chunks.load(y, teacher, chunk);
    }
    float part = 0.0F;
#pragma unroll
    for (int i = 0; i < Chunks<N>::kSize; ++i) {
      x[i] = terms.slope(x[i], y[i], part);
    }
    divergence += static_cast<double>(part);
    if (gradient != nullptr) {
      chunks.store(gradient, chunk, x);
    }
  }
  return divergence;
}

// What the row's weights and the outputs ask for.
struct Wanted {
  double kl_weight, ce_weight;
  int next;
  bool predicts, compares, writes;
};

template <class In, class Out>
__device__ Wanted wanted_of(const Loss<In, Out>& op, std::int64_t t) {
  Wanted w{};
  const bool has_gradient = op.d_student != nullptr;
  w.kl_weight = has_gradient && op.teacher != nullptr ? op.kl_weight[t] : 0.0;
  w.ce_weight = has_gradient && op.ce_weight != nullptr ? op.ce_weight[t] : 0.0;
  w.next = op.next != nullptr ? op.next[t] : -1;
  w.writes = w.kl_weight != 0.0 || w.ce_weight != 0.0;
  w.compares = op.teacher != nullptr && (op.kl != nullptr || w.kl_weight != 0.0);
  w.predicts = w.ce_weight != 0.0 || (op.ce != nullptr && w.next >= 0);
  return w;
}

template <bool kTeacher, bool kPlain>
__device__ Terms<kTeacher, kPlain> terms_of(const Softmax<kPlain>& q,
                                            const Softmax<false>& p,
                                            const Wanted& wanted,
                                            double temperature) {
  const auto beta = static_cast<float>(1.0 / temperature);
  const double q_log = log2(q.sum);
  const double p_log = kTeacher ? log2(p.sum) : 0.0;
  Terms<kTeacher, kPlain> terms{};
  terms.q_largest = q.largest;
  terms.q_log = static_cast<float>(q_log);
  terms.plain_log = static_cast<float>(log2(q.plain_sum));
  terms.p_largest = p.largest;
  terms.p_log = static_cast<float>(p_log);
  const double distance = static_cast<double>(q.largest) - static_cast<double>(p.largest);
  terms.log_ratio =
      static_cast<float>(distance * static_cast<double>(beta) + (q_log - p_log) * kLn2);
  terms.beta = beta;
  terms.scale = static_cast<float>(1.0 / (temperature * kLn2));
  terms.kl_factor = static_cast<float>(wanted.kl_weight * temperature);
  terms.ce_factor = static_cast<float>(wanted.ce_weight);
  return terms;
}

// Loss and gradient of a row whose statistics are there.
template <int N, bool kTeacher, bool kPlain, class In, class Out>
__device__ void finish_row(const Loss<In, Out>& op,
                           std::int64_t t,
                           const Wanted& wanted,
                           const Softmax<kPlain>& q,
                           const Softmax<false>& p,
                           double* shared) {
  const In* student = row_of(op.student, t, op.vocabulary);
  const In* teacher = row_of(op.teacher, t, op.vocabulary);
  Out* gradient = wanted.writes ? row_of(op.d_student, t, op.vocabulary) : nullptr;
  Terms<kTeacher, kPlain> terms = terms_of<kTeacher, kPlain>(q, p, wanted, op.temperature);
  const bool next_exists = wanted.next >= 0 && wanted.next < op.vocabulary;
  if (wanted.ce_weight != 0.0 && !next_exists) {
    terms.ce_factor = kNan;
  }
  float at_next = 0.0F;  // read before the gradient may take the logits' place
  if (threadIdx.x == 0 && next_exists) {
    const float logit = load_float(student[wanted.next]);
    float unused = 0.0F;
    at_next = terms.slope(logit, kTeacher ? load_float(teacher[wanted.next]) : 0.0F, unused);
    at_next -= terms.ce_factor;
    if (op.ce != nullptr) {
      op.ce[t] = log2(q.plain_sum) * kLn2 + (static_cast<double>(q.largest) - logit);
    }
  }
  __syncthreads();
  double divergence = 0.0;
  if (gradient != nullptr || (kTeacher && op.kl != nullptr)) {
    divergence = apply<N>(Chunks<N>(op.vocabulary), terms, gradient, student, teacher);
  }
  if constexpr (kTeacher) {
    divergence = block_sum(divergence, shared);
    if (threadIdx.x == 0 && op.kl != nullptr) {
      op.kl[t] = op.temperature * op.temperature * divergence;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && gradient != nullptr && wanted.ce_weight != 0.0 && next_exists) {
    gradient[wanted.next] = store_as<Out>(at_next);
  }
}

// Statistics of the row in every thread, and whether both models choose the same id.
template <int N, bool kTeacher, bool kPlain, class In, class Out>
__device__ void read_row(const Loss<In, Out>& op,
                         std::int64_t t,
                         Softmax<kPlain>& q,
                         Softmax<false>& p,
                         Shared& shared) {
  const Chunks<N> chunks(op.vocabulary);
  const In* student = row_of(op.student, t, op.vocabulary);
  const In* teacher = row_of(op.teacher, t, op.vocabulary);
  const auto scale = static_cast<float>(1.0 / (op.temperature * kLn2));
  collect<N, kTeacher>(chunks, q, p, student, teacher, scale);
  const float q_largest = block_max(q.largest, shared.largest);
  if constexpr (kTeacher) {
    const float p_largest = block_max(p.largest, shared.largest);
    if (op.agree != nullptr) {
      const int own = choice(chunks, student, q, q_largest, shared.ids);
      const int wanted = choice(chunks, teacher, p, p_largest, shared.ids);
      if (threadIdx.x == 0) {
        op.agree[t] = own == wanted ? 1 : 0;
      }
    }
    p.reduce(p_largest, scale, shared.sums);
  }
  q.reduce(q_largest, scale, shared.sums);
}

template <int N, bool kPlain, class In, class Out>
__global__ void __launch_bounds__(kThreads, 2) distill_loss_kernel(Loss<In, Out> op) {
  __shared__ Shared shared;
  const auto t = static_cast<std::int64_t>(blockIdx.x);
  const Wanted wanted = wanted_of(op, t);
  if (op.ce != nullptr && threadIdx.x == 0) {
    // An id that no row has must not look well.
    op.ce[t] = wanted.next >= op.vocabulary ? static_cast<double>(kNan) : 0.0;
  }
  Softmax<kPlain> q;
  Softmax<false> p;
  if (wanted.compares || op.agree != nullptr) {
    read_row<N, true>(op, t, q, p, shared);
  } else if (wanted.predicts) {
    read_row<N, false>(op, t, q, p, shared);
  }
  if (wanted.compares) {
    finish_row<N, true>(op, t, wanted, q, p, shared.sums);
  } else if (wanted.predicts) {
    finish_row<N, false>(op, t, wanted, q, p, shared.sums);
  }
  if (op.d_student != nullptr && !wanted.writes) {
    __syncthreads();  // the logits that zeros may take the place of are read
    const Chunks<N> chunks(op.vocabulary);
    const float zeros[Chunks<N>::kSize] = {};
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
      chunks.store(row_of(op.d_student, t, op.vocabulary), chunk, zeros);
    }
  }
}

template <class In, class Out>
void launch(CudaStream& stream, const DistillLoss& op) {
  Loss<In, Out> loss{};
  loss.d_student = op.d_student ? op.d_student.as<Out>() : nullptr;
  loss.kl = op.kl ? op.kl.as<double>() : nullptr;
  loss.ce = op.ce ? op.ce.as<double>() : nullptr;
  loss.agree = op.agree ? op.agree.as<std::uint8_t>() : nullptr;
  loss.student = op.student.as<In>();
  loss.teacher = op.teacher ? op.teacher.as<In>() : nullptr;
  loss.next = op.next ? op.next.as<std::int32_t>() : nullptr;
  loss.kl_weight = op.kl_weight ? op.kl_weight.as<double>() : nullptr;
  loss.ce_weight = op.ce_weight ? op.ce_weight.as<double>() : nullptr;
  loss.vocabulary = op.student.shape[1];
  loss.temperature = op.temperature;
  constexpr int kGroup = kVectorSize<In>;
  const bool aligned = op.student.shape[1] % kGroup == 0 &&
                       is_aligned(16, loss.student, loss.teacher, loss.d_student);
  const bool plain = op.temperature != 1.0;
  const auto kernel = aligned ? (plain ? distill_loss_kernel<kGroup, true, In, Out>
                                       : distill_loss_kernel<kGroup, false, In, Out>)
                              : (plain ? distill_loss_kernel<1, true, In, Out>
                                       : distill_loss_kernel<1, false, In, Out>);
  kernel<<<grid_of(op.student.shape[0]), kThreads, 0, stream.handle()>>>(loss);
  BIFOCAL_CUDA(cudaGetLastError());
}

}  // namespace

void run(CudaStream& stream, const DistillLoss& op) {
  constexpr std::int64_t kMostIds = std::int64_t{1} << 30;
  BIFOCAL_REQUIRE(op.student.shape[1] <= kMostIds,
                  "[{}] wanted at most {} ids, got {}: cut the vocabulary",
                  kWhere,
                  kMostIds,
                  op.student.shape[1]);
  if (op.student.shape[0] == 0) {
    return;
  }
  dispatch_device(kWhere, op.student.dtype, [&](auto zero) {
    using In = decltype(zero);
    if (op.d_student && op.d_student.dtype == DType::bf16) {
      launch<In, BFloat16>(stream, op);
    } else {
      launch<In, In>(stream, op);
    }
  });
}

}  // namespace bifocal
