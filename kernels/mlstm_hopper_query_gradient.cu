// The mLSTM's gradients of queries on Hopper: a block for each chunk of each state goes over the
// query heads that read it. Keys, values, C and the weights of the chunk's tokens stay.
#include "kernels/mlstm_hopper_backward.cuh"

namespace bifocal {
namespace hopper {
namespace {

template <int D>
struct QueryMemory {
  static constexpr int kTile = kMlstmChunk * D;

  BFloat16 c[D * D], k[kTile];
  BFloat16 v[kTile], q[kTile], d_h[kTile];  // when all is read, terms of log weights
  MlstmChunkScalars scalars;
  float n[D];
  Barrier own, reads;
};

template <int D>
class QueryGradient {
 public:
  __device__ QueryGradient(const HopperMlstm& m, QueryMemory<D>& memory)
      : m_(m),
        memory_(memory),
        state_(static_cast<int>(blockIdx.x) % m.a.shape.states),
        chunk_(static_cast<int>(blockIdx.x) / m.a.shape.states),
        length_(m.a.shape.length(chunk_)) {}

  __device__ void run() {
    prepare();
    float weight[kMlstmChunk / 2];
    float terms[kMlstmChunk / 2];
#pragma unroll
    for (int i = 0; i < kMlstmChunk / 2; ++i) {
      weight[i] = memory_.scalars.weight(sum_row(i), sum_column(i));
      terms[i] = 0.0F;
    }
    float read[2] = {};
#pragma unroll 1
    for (int reader = 0; reader < m_.a.shape.readers; ++reader) {
      differentiate(reader, weight, terms, read);
    }
    const MlstmArrays<BFloat16>& a = m_.a;
    store_row_numbers(
        read,
        a.logs.read + static_cast<std::int64_t>(state_) * a.shape.tokens + chunk_ * kMlstmChunk,
        length_);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMlstmChunk / 2; ++i) {
      shared_terms()[sum_row(i) * kTermStride + sum_column(i)] = terms[i];
    }
    __syncthreads();
    differentiate_logs();
  }

 private:
  static constexpr int kTermStride = kMlstmChunk + 1;
  static constexpr int kTileBytes = QueryMemory<D>::kTile * static_cast<int>(sizeof(BFloat16));

  // [64][kTermStride]
  __device__ float* shared_terms() const {
    static_assert(3 * QueryMemory<D>::kTile * sizeof(BFloat16) >=
                  sizeof(float) * kMlstmChunk * kTermStride);
    return reinterpret_cast<float*>(memory_.v);
  }

  // By one thread.
  __device__ void load_reads(int reader) {
    const int head = state_ * m_.a.shape.readers + reader;
    memory_.reads.arrive_expect(2 * kTileBytes);
    load_chunk<D>(memory_.q, m_.q, memory_.reads, head, chunk_);
    load_chunk<D>(memory_.d_h, m_.d_h, memory_.reads, head, chunk_);
  }

  // All but the reads. Where no state enters, C and n may be anything and become zero.
  __device__ void prepare() {
    const MlstmShape& shape = m_.a.shape;
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t at = static_cast<std::int64_t>(chunk_) * shape.states + state_;
    if (thread == 0) {
      memory_.own.init(1);
      memory_.reads.init(1);
      publish_barriers();
      constexpr int kStateBytes = D * D * static_cast<int>(sizeof(BFloat16));
      memory_.own.arrive_expect(2 * kTileBytes + kStateBytes);
      load_chunk<D>(memory_.k, m_.k, memory_.own, state_, chunk_);
      load_chunk<D>(memory_.v, m_.v, memory_.own, state_ / shape.holders, chunk_);
      load_bytes(memory_.c, m_.entering.c + at * D * D, kStateBytes, memory_.own);
      load_reads(0);
    }
    memory_.scalars.load(shape, m_.a.scalars, chunk_, state_);
    __syncthreads();
    const bool carries = memory_.scalars.carry[0] != 0.0F;
    if (thread < D) {
      memory_.n[thread] = carries ? m_.entering.n[at * D + thread] : 0.0F;
    }
    memory_.own.wait(0);
    if (!carries) {
      for (int i = thread; i < D * D / 8; i += kGroupThreads) {
        reinterpret_cast<uint4*>(memory_.c)[i] = make_uint4(0, 0, 0, 0);
      }
      publish_shared();
    }
    __syncthreads();
  }

  // q . (d_h C^T) and q . n of a thread's rows, in parts of four lanes.
  __device__ void read_state(float (&of_c)[2], float (&of_n)[2], const float (&sums)[D / 2]) const {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const std::uint32_t q = pair_of(memory_.q, i);
      const auto n = load_vector<2>(memory_.n + i / 2 * 8 + pair_column(), 0);
      of_c[i % 2] += low_of(q) * sums[2 * i] + high_of(q) * sums[2 * i + 1];
      of_n[i % 2] += low_of(q) * n.element[0] + high_of(q) * n.element[1];
    }
  }

  __device__ void differentiate(int reader,
                                const float (&weight)[kMlstmChunk / 2],
                                float (&terms)[kMlstmChunk / 2],
                                float (&read)[2]) {
    float s[kMlstmChunk / 2];  // q k^T, then the gradient of it
    float g[kMlstmChunk / 2];  // d_h v^T
    float sums[D / 2];
    memory_.reads.wait(reader % 2);
    begin_products();
    multiply_chunks<D>(s, memory_.q, memory_.k);
    multiply_chunks<D>(g, memory_.d_h, memory_.v);
    multiply_state_transposed<D>(sums, memory_.d_h, memory_.c);
    commit_products();
    wait_products<0>();
    keep(s);
    keep(g);
    keep(sums);
    float of_c[2] = {};
    float of_n[2] = {};
    read_state(of_c, of_n, sums);
    __syncthreads();
    if (threadIdx.x == 0 && reader + 1 < m_.a.shape.readers) {
      load_reads(reader + 1);
    }
    float inverse[2];
    float delta[2];
    weigh(s, weight, g, of_c, of_n, inverse, delta);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      read[half] += inverse[half] * of_c[half] + delta[half] * of_n[half];
    }
    std::uint32_t factor[kMlstmChunk / 16][4];
#pragma unroll
    for (int i = 0; i < kMlstmChunk / 2; ++i) {
      const int half = i % 4 / 2;
      const float gradient = weight[i] * (inverse[half] * g[i] + delta[half]);
      terms[i] += s[i] * gradient;
      s[i] = gradient;
    }
    pack_factor(factor, s);
    add_state(sums, inverse, delta);
    keep(sums);
    keep(factor);
    begin_products();
    add_rows<D>(sums, factor, memory_.k);
    commit_products();
    const int head = state_ * m_.a.shape.readers + reader;
    store_scalars(head, inverse, delta);
    wait_products<0>();
    keep(sums);
    keep(factor);
    store_chunk<D>(sums,
                   m_.a.d_q + m_.a.shape.head_row(chunk_ * kMlstmChunk, head),
                   static_cast<std::int64_t>(m_.a.shape.heads) * D,
                   length_);
  }

  // 1 / N and delta = -d_h . h / N of the rows; of_c and of_n become sums over lanes times u.
  __device__ void weigh(const float (&s)[kMlstmChunk / 2],
                        const float (&weight)[kMlstmChunk / 2],
                        const float (&g)[kMlstmChunk / 2],
                        float (&of_c)[2],
                        float (&of_n)[2],
                        float (&inverse)[2],
                        float (&delta)[2]) const {
    float normaliser[2] = {};
    float product[2] = {};
#pragma unroll
    for (int i = 0; i < kMlstmChunk / 2; ++i) {
      const float p = weight[i] * s[i];
      normaliser[i % 4 / 2] += p;
      product[i % 4 / 2] += p * g[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float carry = memory_.scalars.carry[chunk_row() + half * 8];
      of_c[half] = carry * quad_sum(of_c[half]);
      of_n[half] = carry * quad_sum(of_n[half]);
      inverse[half] = 1.0F / (quad_sum(normaliser[half]) + of_n[half] + kMlstmFloatTiny);
      const float whole = quad_sum(product[half]) + of_c[half];
      delta[half] = -inverse[half] * (inverse[half] * whole);
    }
  }

  // What the entering state gives d_q: u (d_h C^T / N + delta n).
  __device__ void add_state(float (&sums)[D / 2],
                            const float (&inverse)[2],
                            const float (&delta)[2]) const {
    float of_c[2];
    float of_n[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float carry = memory_.scalars.carry[chunk_row() + half * 8];
      of_c[half] = carry * inverse[half];
      of_n[half] = carry * delta[half];
    }
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const auto n = load_vector<2>(memory_.n + i / 2 * 8 + pair_column(), 0);
      sums[2 * i] = of_c[i % 2] * sums[2 * i] + of_n[i % 2] * n.element[0];
      sums[2 * i + 1] = of_c[i % 2] * sums[2 * i + 1] + of_n[i % 2] * n.element[1];
    }
  }

  __device__ void store_scalars(int head, const float (&inverse)[2], const float (&delta)[2]) {
    const std::int64_t at = static_cast<std::int64_t>(head) * m_.a.shape.chunks + chunk_;
    MlstmReadScalars& read = m_.reads[at];
    MlstmRowScales& scales = m_.read_scales[at];
    if (lane_of_warp() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = chunk_row() + half * 8;
        const bool present = row < length_;
        read.inverse[row] = present ? inverse[half] : 0.0F;
        read.delta[row] = present ? delta[half] : 0.0F;
        scales.scale[row] = present ? memory_.scalars.carry[row] * inverse[half] : 0.0F;
        scales.extra[row] = present ? delta[half] / inverse[half] : 0.0F;
      }
    }
    if (threadIdx.x == 0) {
      scales.pass =
          m_.a.scalars.pass[static_cast<std::int64_t>(state_) * m_.a.shape.chunks + chunk_];
    }
  }

  // From terms[t][j] = w_tj s_tj dw_tj of all query heads, which is overwritten: sums over what
  // decays through each token and over what reads it.
  __device__ void differentiate_logs() const {
    const MlstmArrays<BFloat16>& a = m_.a;
    float* all = shared_terms();
    constexpr int kAhead = 8;
    const int i = static_cast<int>(threadIdx.x);
    if (i < kMlstmChunk) {
      float sum = 0.0F;
#pragma unroll 1
      for (int last = kMlstmChunk - 1; last >= 0; last -= kAhead) {
        float term[kAhead];
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
          term[step] = all[(last - step) * kTermStride + i];
        }
#pragma unroll
        for (int step = 0; step < kAhead; ++step) {
          sum += term[step];
          all[(last - step) * kTermStride + i] = sum;
        }
      }
    }
    __syncthreads();
    if (i < length_) {
      float through = 0.0F;
#pragma unroll 8
      for (int j = 0; j < kMlstmChunk; ++j) {
        through += j < i ? all[i * kTermStride + j] : 0.0F;
      }
      const std::int64_t at =
          static_cast<std::int64_t>(state_) * a.shape.tokens + chunk_ * kMlstmChunk + i;
      a.logs.through[at] = through;
      a.logs.written[at] = all[i * (kTermStride + 1)];
    }
  }

  const HopperMlstm& m_;
  QueryMemory<D>& memory_;
  const int state_, chunk_, length_;
};

template <int D>
__global__ void __launch_bounds__(kGroupThreads, 2)
    query_gradient_kernel(const __grid_constant__ HopperMlstm m) {
#if BIFOCAL_HOPPER_CODE
  QueryGradient<D>(m, *reinterpret_cast<QueryMemory<D>*>(swizzle_memory())).run();
#endif
}

template <int D>
void launch(CudaStream& stream, const HopperMlstm& m) {
  constexpr int kBytes = static_cast<int>(sizeof(QueryMemory<D>)) + kSwizzleAtomBytes;
  launch_kernel(stream,
                grid_of(static_cast<std::int64_t>(m.a.shape.chunks) * m.a.shape.states),
                kGroupThreads,
                kBytes,
                query_gradient_kernel<D>,
                m);
}

}  // namespace

void mlstm_query_gradients(CudaStream& stream, const HopperMlstm& m) {
  m.a.shape.dim == 64 ? launch<64>(stream, m) : launch<128>(stream, m);
}

}  // namespace hopper
}  // namespace bifocal
