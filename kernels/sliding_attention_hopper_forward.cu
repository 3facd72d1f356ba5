// Sliding attention on Hopper, forward: the warpgroups that multiply, and the launch.
#include <cmath>

#include "kernels/device_scratch.h"
#include "kernels/launch.cuh"
#include "kernels/sliding_attention_hopper.cuh"

namespace bifocal {
namespace hopper {
namespace {

// The rows of a thread, in one item: half h is row `row` + 8 h of the block.
template <int D>
class Rows {
 public:
  using Shape = ForwardShape<D>;

  __device__ Rows(const ForwardProblem& problem, int group)
      : problem_(problem), first_row_(group * kGroupRows) {
    const int row =
        first_row_ + static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane_id() / 4;
    const int size = problem.args.group;
    const int last = problem.block_tokens - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = (row + 8 * half) / size;
      is_row_[half] = token <= last;  // rows are left over where 128 is no multiple of the group
      token_[half] = min(token, last);
      head_[half] = (row + 8 * half) % size;
    }
    first_token_ = min(first_row_ / size, last);
    last_token_ = min((first_row_ + kGroupRows - 1) / size, last);
  }

  __device__ void start(const ForwardWork& work) {
    kv_head_ = work.kv_head;
    token_0_ = work.first_token;
    pinned_tiles = work.pinned_tiles;
    tiles = work.tiles;
    pinned_key_ = work.pinned_key;
    window_key_ = work.window_key - pinned_tiles * Shape::kKeys;
    full_.begin = work.begin[last_token_];
    full_.end = problem_.args.own() + token_0_ + first_token_ + 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin_[half] = work.begin[token_[half]];
      end_[half] = problem_.args.own() + min(token_0_ + token_[half] + 1, problem_.args.tokens);
      if (pinned_tiles > 0) {
        pinned_[half] = {work.pinned_begin[token_[half]], work.pinned_end[token_[half]]};
      }
    }
  }

  // Sets the products with keys of tile `index` that a row does not see to -infinity.
  __device__ void mask(float (&s)[Shape::kKeys / 2], int index) const {
    const int column = lane_id() % 4 * 2;
    if (index < pinned_tiles) {
      const int first = pinned_key_ + index * Shape::kKeys + column;
      mask_left(s, pinned_[0].begin - first, pinned_[1].begin - first);
      mask_right(s, pinned_[0].end - first, pinned_[1].end - first);
      return;
    }
    const int key = window_key_ + index * Shape::kKeys;
    if (key < full_.begin) {
      mask_left(s, begin_[0] - key - column, begin_[1] - key - column);
    }
    if (key + Shape::kKeys > full_.end) {
      mask_right(s, end_[0] - key - column, end_[1] - key - column);
    }
  }

  // The row's place in [tokens, heads], or -1 for none.
  __device__ std::int64_t place(int half) const {
    const int token = token_0_ + token_[half];
    return is_row_[half] && token < problem_.args.tokens
               ? static_cast<std::int64_t>(token) * problem_.args.heads + head(half)
               : -1;
  }

  __device__ int head(int half) const {
    return kv_head_ * problem_.args.group + head_[half];
  }

  int pinned_tiles, tiles;

 private:
  static __device__ void mask_left(float (&s)[Shape::kKeys / 2], int begin_0, int begin_1) {
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 2; ++i) {
      if (i / 4 * 8 + i % 2 < (i % 4 < 2 ? begin_0 : begin_1)) {
        s[i] = -INFINITY;
      }
    }
  }

  static __device__ void mask_right(float (&s)[Shape::kKeys / 2], int end_0, int end_1) {
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= (i % 4 < 2 ? end_0 : end_1)) {
        s[i] = -INFINITY;
      }
    }
  }

  const ForwardProblem& problem_;
  int first_row_, first_token_, last_token_;
  int token_[2], head_[2];
  bool is_row_[2];
  int kv_head_, token_0_, pinned_key_, window_key_;
  int begin_[2], end_[2];
  KeySpan pinned_[2];
  KeySpan full_;  // window keys that all rows of the warpgroup see
};

// The softmax of a thread's two rows over the tiles so far. `largest` is at least the largest
// product but kSlack / scale.
template <int Keys>
struct RowSoftmax {
  // A row's largest logit counts as unchanged until it grows by so many powers of 2: probabilities
  // then reach 2^8, which bfloat16 and float32 hold as well as 1, and sums need no new scale.
  static constexpr float kSlack = 8.0F;
  static constexpr int kSize = Keys / 2;  // numbers of a thread

  float scale;  // of products, times log2(e)
  float largest[2];
  float sum[2];
  float factor[2];  // from the scale before the last tile to the one after

  __device__ void start() {
    largest[0] = largest[1] = -INFINITY;
    sum[0] = sum[1] = 0.0F;
  }

  // Turns products into probabilities. Whether earlier sums need the factors.
  __device__ bool take(float (&s)[kSize]) {
    float base[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = s[2 * half];
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i) {
        most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
      }
      most = quad_max(most);
      const float growth = (most - largest[half]) * scale;  // NaN where a row has seen nothing yet
      factor[half] = growth > kSlack ? exp2_fast(-growth) : 1.0F;
      largest[half] = growth > kSlack ? most : largest[half];
      grows = grows || growth > kSlack;
      base[half] = largest[half] == -INFINITY ? 0.0F : largest[half] * scale;
    }
    const bool rescale = __any_sync(0xffffffffU, grows) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = 0.0F;
#pragma unroll
      for (int i = 0; i < kSize / 4; ++i) {
#pragma unroll
        for (int e = 4 * i + 2 * half; e < 4 * i + 2 * half + 2; ++e) {
          s[e] = exp2_fast(fmaf(s[e], scale, -base[half]));
          total += s[e];
        }
      }
      sum[half] = fmaf(sum[half], factor[half], total);
    }
    return rescale;
  }

  template <int R>
  __device__ void rescale(float (&out)[R]) const {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      out[i] *= factor[i % 4 / 2];
    }
  }
};

template <int R>
__device__ void pack(std::uint32_t (&p)[R / 8][4], const float (&s)[R]) {
#pragma unroll
  for (int i = 0; i < R / 2; ++i) {
    p[i / 4][i % 4] = pack_bfloat16(s[2 * i], s[2 * i + 1]);
  }
}

// A warpgroup that multiplies. Two of them take turns at starting products, so that one's softmax
// runs under the other's products; a warpgroup's own next products with keys run under its softmax
// too, and so do its last ones with values.
template <int D>
class Multiplier {
 public:
  using Shape = ForwardShape<D>;

  // group: 0 or 1
  __device__ Multiplier(const ForwardProblem& problem, ForwardShared<D>& shared, int group)
      : problem_(problem), shared_(shared), rows_(problem, group), group_(group) {
    softmax_.scale = problem.args.scale * kLog2OfE;
    if (group == 1) {
      named_arrive(turn(0), 2 * kGroupThreads);
    }
  }

  __device__ void run() {
    for (RingPlace<Shape::kWorks> place;; place.advance()) {
      shared_.work_full[place.stage].wait(place.parity);
      if (shared_.work[place.stage].kv_head < 0) {
        return;
      }
      rows_.start(shared_.work[place.stage]);
      if (problem_.args.sink != nullptr) {
        sink_[0] = load_float(problem_.args.sink[rows_.head(0)]) * kLog2OfE;
        sink_[1] = load_float(problem_.args.sink[rows_.head(1)]) * kLog2OfE;
      }
      arrive_warp(shared_.work_empty[place.stage]);
      shared_.q_full[slot_.stage].wait(slot_.parity);
      attend();
      slot_.advance();
    }
  }

 private:
  static __device__ int turn(int group) { return 1 + group; }  // of named barriers

  __device__ void multiply_keys(float (&s)[Shape::kKeys / 2]) {
    const Operand q =
        Operand::by_rows(shared_.q[slot_.stage] + group_ * kGroupRows * kSwizzleColumns);
    const Operand k = Operand::by_rows(shared_.k[k_place_.stage]);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      multiply<false, false>(
          s, q + row_step(Shape::kRows, step), k + row_step(Shape::kKeys, step), step > 0);
    }
    commit_products();
  }

  __device__ void multiply_values(float (&out)[D / 2],
                                  const std::uint32_t (&p)[Shape::kKeys / 16][4]) {
    const Operand v = Operand::by_columns(shared_.v[v_place_.stage], Shape::kKeys);
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      multiply<true>(out, p[step], v + column_step(step), true);
    }
    commit_products();
  }

  __device__ void attend() {
    float out[D / 2];
#pragma unroll
    for (float& x : out) {
      x = 0.0F;
    }
    float s[Shape::kKeys / 2];
    std::uint32_t p[Shape::kKeys / 16][4];
    softmax_.start();
    shared_.k_full[k_place_.stage].wait(k_place_.parity);
    begin_products();
    multiply_keys(s);
    wait_products<0>();
    keep(s);
    release_keys();
    rows_.mask(s, 0);
    bool rescales = softmax_.take(s);
    for (int i = 1;; ++i) {
      // The loop's edge keeps the wait behind the softmax: within a piece of straight code the
      // assembler would move it ahead. All warps of a warpgroup come to the same wait.
      wait_products<0>();
      keep(out);
      if (rescales) {
        softmax_.rescale(out);
      }
      if (i > 1) {
        release_values();
      }
      pack(p, s);
      if (i == rows_.tiles) {
        break;
      }
      shared_.k_full[k_place_.stage].wait(k_place_.parity);
      named_sync(turn(group_), 2 * kGroupThreads);
      keep(out);
      keep(p);
      begin_products();
      multiply_keys(s);
      shared_.v_full[v_place_.stage].wait(v_place_.parity);
      begin_products();
      multiply_values(out, p);
      named_arrive(turn(1 - group_), 2 * kGroupThreads);
      wait_products<1>();
      keep(s);
      release_keys();
      rows_.mask(s, i);
      rescales = softmax_.take(s);
    }
    arrive_warp(shared_.q_empty[slot_.stage]);
    shared_.v_full[v_place_.stage].wait(v_place_.parity);
    keep(out);
    keep(p);
    begin_products();
    multiply_values(out, p);
    wait_products<0>();
    keep(out);
    release_values();
    finish(out);
  }

  __device__ void release_keys() {
    arrive_warp(shared_.k_empty[k_place_.stage]);
    k_place_.advance();
  }

  __device__ void release_values() {
    arrive_warp(shared_.v_empty[v_place_.stage]);
    v_place_.advance();
  }

  // Joins the sink and stores the rows.
  __device__ void finish(float (&out)[D / 2]) {
    std::int64_t places[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t place = places[half] = rows_.place(half);
      float total = quad_sum(softmax_.sum[half]);
      float largest = softmax_.largest[half] * softmax_.scale;
      float factor = 1.0F;
      if (problem_.args.sink != nullptr) {
        const float most = fmaxf(largest, sink_[half]);
        factor = exp2_fast(largest - most);
        total = total * factor + exp2_fast(sink_[half] - most);
        largest = most;
      }
      softmax_.factor[half] = __fdividef(factor, total);
      if (lane_id() % 4 == 0 && place >= 0) {
        problem_.lse[place] = (largest + log2f(total)) * kLnOf2;
      }
    }
    softmax_.rescale(out);
    store(out, places);
  }

  // Four lanes hold two columns each of eight; after trading among four such groups of columns each
  // lane has eight columns of one of them: 16 bytes.
  __device__ void store(const float (&out)[D / 2], const std::int64_t (&places)[2]) const {
    const int lane = lane_id();
    const bool odd = lane % 2 == 1;
    const bool upper = lane % 4 >= 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        std::uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (j + i) + 2 * half;
          w[i] = pack_bfloat16(out[at], out[at + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const std::uint32_t got = __shfl_xor_sync(0xffffffffU, odd ? w[i] : w[i + 1], 1);
          (odd ? w[i] : w[i + 1]) = got;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t got = __shfl_xor_sync(0xffffffffU, upper ? w[i] : w[i + 2], 2);
          (upper ? w[i] : w[i + 2]) = got;
        }
        if (places[half] >= 0) {
          BFloat16* to = problem_.out + places[half] * D + (j + lane % 4) * 8;
          *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
        }
      }
    }
  }

  const ForwardProblem& problem_;
  ForwardShared<D>& shared_;
  Rows<D> rows_;
  int group_;
  RowSoftmax<Shape::kKeys> softmax_;
  float sink_[2];  // of the rows' heads, times log2(e)
  RingPlace<Shape::kSlots> slot_;
  RingPlace<Shape::kStages> k_place_;
  RingPlace<Shape::kStages> v_place_;
};

template <int D>
__global__ void __launch_bounds__(ForwardShape<D>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ ForwardProblem problem) {
#if BIFOCAL_HOPPER_CODE
  auto& shared = *reinterpret_cast<ForwardShared<D>*>(swizzle_memory());
  if (threadIdx.x == 0) {
    shared.init_barriers();
  }
  __syncthreads();
  const int group = warpgroup_id();
  if (group == 0) {
    lower_registers<24>();
    if (warp_id() == 0) {
      draw_work<D>(problem, shared);
    } else if (threadIdx.x == 32) {
      load_work<D>(problem, maps, shared);
    }
  } else {
    raise_registers<240>();
    Multiplier<D>(problem, shared, group - 1).run();
  }
#endif
}

ForwardMaps make_maps(const AttentionArgs<BFloat16>& a, int block_tokens, int keys) {
  const auto map_of = [&](const BFloat16* x, int rows, int heads, int box_heads, int box_rows) {
    return make_tensor_map(
        x,
        {{.size = a.dim, .stride = 1, .box = kSwizzleColumns},
         {.size = heads, .stride = a.dim, .box = box_heads},
         {.size = rows, .stride = static_cast<std::int64_t>(heads) * a.dim, .box = box_rows}});
  };
  ForwardMaps maps{};
  maps.q = map_of(a.q, a.tokens, a.heads, a.group, block_tokens);
  maps.k = map_of(a.k, a.keys, a.kv_heads, 1, keys);
  maps.v = map_of(a.v, a.keys, a.kv_heads, 1, keys);
  if (a.pinned > 0) {
    maps.pinned_k = map_of(a.pinned_k, a.pinned, a.kv_heads, 1, keys);
    maps.pinned_v = map_of(a.pinned_v, a.pinned, a.kv_heads, 1, keys);
  }
  return maps;
}

template <int D>
void launch(CudaStream& stream, const AttentionArgs<BFloat16>& a, BFloat16* out, float* lse) {
  using Shape = ForwardShape<D>;
  const int block_tokens = Shape::kRows / a.group;
  const auto blocks = static_cast<int>(ceil_div(a.tokens, block_tokens));
  DeviceScratch scratch(stream);
  int* drawn = scratch.take<int>(1);
  BIFOCAL_CUDA(cudaMemsetAsync(drawn, 0, sizeof(int), stream.handle()));
  const ForwardProblem problem{.args = a,
                               .block_tokens = block_tokens,
                               .blocks = blocks,
                               .drawn = drawn,
                               .out = out,
                               .lse = lse};
  const std::int64_t items = static_cast<std::int64_t>(blocks) * a.kv_heads;
  launch_kernel(stream,
                grid_of(std::min<std::int64_t>(items, num_multiprocessors())),
                Shape::kThreads,
                static_cast<int>(sizeof(ForwardShared<D>)) + kSwizzleAtomBytes,
                forward_kernel<D>,
                make_maps(a, block_tokens, Shape::kKeys),
                problem);
}

}  // namespace
}  // namespace hopper

void attend_hopper(CudaStream& stream,
                   const AttentionArgs<BFloat16>& a,
                   BFloat16* out,
                   float* lse) {
  if (a.tokens == 0) {
    return;
  }
  if (a.dim == 64) {
    hopper::launch<64>(stream, a, out, lse);
  } else if (a.dim == 128) {
    hopper::launch<128>(stream, a, out, lse);
  } else {
    hopper::launch<256>(stream, a, out, lse);
  }
}

}  // namespace bifocal
