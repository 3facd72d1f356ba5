// The mLSTM's gradients of keys and values on Hopper: a block for each chunk of each value head
// goes over the states that hold it and their query heads. Products are transposed, S^T = K Q^T and
// G^T = V dH^T, so that weights and gradients are left factors of dV += P^T dH and dK += dS^T Q.
#include "kernels/mlstm_hopper_backward.cuh"

namespace bifocal {
namespace hopper {
namespace {

template <int D>
struct KeyMemory {
  static constexpr int kTile = kMlstmChunk * D;
  static constexpr int kPair = 2 * kTile;  // queries, then gradients of reads
  static constexpr int kState = D * D;

  BFloat16 k[kTile], v[kTile];
  BFloat16 first[kPair];
  BFloat16 second[kPair > kState ? kPair : kState];  // dC comes before the second pair
  MlstmReadScalars reads[2];
  MlstmChunkScalars scalars;
  float d_n[D];
  float partial[kGroupThreads / kWarp];
  Barrier own, pairs[2];
};

template <int D>
class KeyGradient {
 public:
  __device__ KeyGradient(const HopperMlstm& m, KeyMemory<D>& memory)
      : m_(m),
        memory_(memory),
        v_head_(static_cast<int>(blockIdx.x) % m.a.shape.v_heads),
        chunk_(static_cast<int>(blockIdx.x) / m.a.shape.v_heads),
        length_(m.a.shape.length(chunk_)) {}

  __device__ void run() {
    const MlstmShape& shape = m_.a.shape;
    if (threadIdx.x == 0) {
      memory_.own.init(1);
      memory_.pairs[0].init(1);
      memory_.pairs[1].init(1);
      publish_barriers();
    }
    __syncthreads();
    float d_v[D / 2];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      d_v[i] = 0.0F;
    }
#pragma unroll 1
    for (int holder = 0; holder < shape.holders; ++holder) {
      const int state = v_head_ * shape.holders + holder;
      float d_k[D / 2];
      load_own(state, holder == 0);
      memory_.scalars.load(shape, m_.a.scalars, chunk_, state);
      leave_chunk(state, holder % 2, d_k, d_v);
      __syncthreads();
      if (threadIdx.x == 0 && shape.readers > 1) {
        load_pair(state, 1);
      }
#pragma unroll 1
      for (int reader = 0; reader < shape.readers; ++reader) {
        add_reads(reader % 2, d_k, d_v);
        __syncthreads();
        if (threadIdx.x == 0 && reader + 2 < shape.readers) {
          load_pair(state, reader + 2);
        }
      }
      store_chunk<D>(d_k,
                     m_.a.d_k + shape.key_row(chunk_ * kMlstmChunk, state),
                     static_cast<std::int64_t>(shape.states) * D,
                     length_);
    }
    store_chunk<D>(d_v,
                   m_.a.d_v + shape.value_row(chunk_ * kMlstmChunk, v_head_),
                   static_cast<std::int64_t>(shape.v_heads) * D,
                   length_);
  }

 private:
  static constexpr int kTileBytes = KeyMemory<D>::kTile * static_cast<int>(sizeof(BFloat16));
  static constexpr int kStateBytes = D * D * static_cast<int>(sizeof(BFloat16));

  __device__ BFloat16* queries(int slot) const {
    return slot == 0 ? memory_.first : memory_.second;
  }

  __device__ BFloat16* read_gradients(int slot) const {
    return queries(slot) + KeyMemory<D>::kTile;
  }

  // By one thread.
  __device__ void load_pair(int state, int reader) {
    const int slot = reader % 2;
    const int head = state * m_.a.shape.readers + reader;
    Barrier& full = memory_.pairs[slot];
    full.arrive_expect(2 * kTileBytes + static_cast<int>(sizeof(MlstmReadScalars)));
    load_chunk<D>(queries(slot), m_.q, full, head, chunk_);
    load_chunk<D>(read_gradients(slot), m_.d_h, full, head, chunk_);
    load_bytes(&memory_.reads[slot],
               m_.reads + static_cast<std::int64_t>(head) * m_.a.shape.chunks + chunk_,
               sizeof(MlstmReadScalars),
               full);
  }

  __device__ void load_own(int state, bool with_values) {
    if (threadIdx.x == 0) {
      const std::int64_t at = static_cast<std::int64_t>(chunk_) * m_.a.shape.states + state;
      memory_.own.arrive_expect(kStateBytes + (with_values ? 2 : 1) * kTileBytes);
      load_bytes(memory_.second, m_.leaving.c + at * D * D, kStateBytes, memory_.own);
      load_chunk<D>(memory_.k, m_.k, memory_.own, state, chunk_);
      if (with_values) {
        load_chunk<D>(memory_.v, m_.v, memory_.own, v_head_, chunk_);
      }
      load_pair(state, 0);
    }
  }

  // <X, dX>: what passes the chunk whole. Where nothing does, X may be anything and is not read.
  __device__ void pass_states(int state) {
    const MlstmArrays<BFloat16>& a = m_.a;
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t at = static_cast<std::int64_t>(chunk_) * a.shape.states + state;
    const std::int64_t scalar = static_cast<std::int64_t>(state) * a.shape.chunks + chunk_;
    const float pass = a.scalars.pass[scalar];
    float sum = 0.0F;
    if (pass != 0.0F) {
      const BFloat16* c = m_.entering.c + at * D * D;
#pragma unroll 4
      for (int i = thread; i < D * D / 8; i += kGroupThreads) {
        const auto x = load_packed(c, i);
        const auto d_x = load_packed(static_cast<const BFloat16*>(memory_.second), i);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          sum += x[e] * d_x[e];
        }
      }
      if (thread < D) {
        sum += m_.entering.n[at * D + thread] * memory_.d_n[thread];
      }
    }
    sum = warp_sum(sum);
    if (lane_of_warp() == 0) {
      memory_.partial[thread / kWarp] = sum;
    }
    __syncthreads();
    if (thread == 0) {
      sum = (memory_.partial[0] + memory_.partial[1]) + (memory_.partial[2] + memory_.partial[3]);
      a.logs.passed[scalar] = pass == 0.0F ? 0.0F : pass * sum;
    }
  }

  // The part of the state after the chunk: starts d_k, adds to d_v.
  __device__ void leave_chunk(int state, int parity, float (&d_k)[D / 2], float (&d_v)[D / 2]) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t at = static_cast<std::int64_t>(chunk_) * m_.a.shape.states + state;
    if (thread < D) {
      memory_.d_n[thread] = m_.leaving.n[at * D + thread];
    }
    __syncthreads();
    const float write[2] = {memory_.scalars.write[chunk_row()],
                            memory_.scalars.write[chunk_row() + 8]};
    memory_.own.wait(parity);
    std::uint32_t factor[D / 16][4];
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const int row = chunk_row() - lane_of_warp() / 4 + lane_of_warp() % 16;
      load_matrices(factor[step],
                    SharedElements(memory_.k),
                    swizzled_offset(kMlstmChunk, row, step * 16 + lane_of_warp() / 16 * 8));
      scale_rows(factor[step], write[0], write[1]);
    }
    keep(factor);
    keep(d_v);
    begin_products();
    multiply_state_transposed<D>(d_k, memory_.v, memory_.second);
    const Operand columns = Operand::by_columns(memory_.second, D);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      multiply<true>(d_v, factor[step], columns + column_step(step), true);
    }
    commit_products();
    wait_products<0>();
    keep(d_k);
    keep(d_v);
    keep(factor);
    pass_states(state);
    float left[2] = {};
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const std::uint32_t k = pair_of(memory_.k, i);
      const auto d_n = load_vector<2>(memory_.d_n + i / 2 * 8 + pair_column(), 0);
      d_k[2 * i] = write[i % 2] * (d_k[2 * i] + d_n.element[0]);
      d_k[2 * i + 1] = write[i % 2] * (d_k[2 * i + 1] + d_n.element[1]);
      left[i % 2] += low_of(k) * d_k[2 * i] + high_of(k) * d_k[2 * i + 1];
    }
    left[0] = quad_sum(left[0]);
    left[1] = quad_sum(left[1]);
    store_row_numbers(left,
                      m_.a.logs.left + static_cast<std::int64_t>(state) * m_.a.shape.tokens +
                          chunk_ * kMlstmChunk,
                      length_);
  }

  // What the reads of one query head give.
  __device__ void add_reads(int slot, float (&d_k)[D / 2], float (&d_v)[D / 2]) {
    const BFloat16* q = queries(slot);
    const BFloat16* d_h = read_gradients(slot);
    const MlstmReadScalars& reads = memory_.reads[slot];
    float s[kMlstmChunk / 2];
    float g[kMlstmChunk / 2];
    memory_.pairs[slot].wait(parities_ >> slot & 1);
    parities_ ^= 1 << slot;
    begin_products();
    multiply_chunks<D>(s, memory_.k, q);
    multiply_chunks<D>(g, memory_.v, d_h);
    commit_products();
    wait_products<0>();
    keep(s);
    keep(g);
    const int j = chunk_row();
#pragma unroll
    for (int i = 0; i < kMlstmChunk / 2; ++i) {
      const int t = sum_column(i);
      const float weight = memory_.scalars.weight(t, j + i % 4 / 2 * 8);
      const float scaled = weight * reads.inverse[t];
      s[i] = scaled * s[i];
      g[i] = scaled * g[i] + weight * reads.delta[t];
    }
    std::uint32_t weights[kMlstmChunk / 16][4];
    std::uint32_t gradients[kMlstmChunk / 16][4];
    pack_factor(weights, s);
    pack_factor(gradients, g);
    keep(weights);
    keep(gradients);
    keep(d_k);
    begin_products();
    add_rows<D>(d_v, weights, d_h);
    add_rows<D>(d_k, gradients, q);
    commit_products();
    wait_products<0>();
    keep(d_v);
    keep(d_k);
    keep(weights);
    keep(gradients);
  }

  const HopperMlstm& m_;
  KeyMemory<D>& memory_;
  const int v_head_, chunk_, length_;
  int parities_ = 0;  // bit i: of the slot's next phase
};

template <int D>
__global__ void __launch_bounds__(kGroupThreads, 2)
    key_gradient_kernel(const __grid_constant__ HopperMlstm m) {
#if BIFOCAL_HOPPER_CODE
  KeyGradient<D>(m, *reinterpret_cast<KeyMemory<D>*>(swizzle_memory())).run();
#endif
}

template <int D>
void launch(CudaStream& stream, const HopperMlstm& m) {
  constexpr int kBytes = static_cast<int>(sizeof(KeyMemory<D>)) + kSwizzleAtomBytes;
  launch_kernel(stream,
                grid_of(static_cast<std::int64_t>(m.a.shape.chunks) * m.a.shape.v_heads),
                kGroupThreads,
                kBytes,
                key_gradient_kernel<D>,
                m);
}

}  // namespace

void mlstm_key_gradients(CudaStream& stream, const HopperMlstm& m) {
  m.a.shape.dim == 64 ? launch<64>(stream, m) : launch<128>(stream, m);
}

}  // namespace hopper
}  // namespace bifocal
