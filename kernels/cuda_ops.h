// The ops that have CUDA kernels. Tensors lie on the stream's device, are float32 or bfloat16 and
// of one type in an op, except where said; arithmetic is float32, rounded once at each store.
// Other types throw Error. Nothing here waits for the device.
#pragma once

#include "kernels/cuda_stream.h"
#include "ops/adamw.h"
#include "ops/bifocal_gate.h"
#include "ops/decode_attention.h"
#include "ops/elementwise.h"
#include "ops/feature_map.h"
#include "ops/mlstm.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/sliding_attention.h"
#include "ops/swiglu.h"

namespace bifocal {

void run(CudaStream&, const RmsNormForward&);
void run(CudaStream&, const SwigluForward&);
void run(CudaStream&, const SwigluBackward&);
void run(CudaStream&, const AdamW&);
void run(CudaStream&, const Add&);
void run(CudaStream&, const Zero&);
// Between float32 and bfloat16 in any pairing.
void run(CudaStream&, const Cast&);
// cos and sin are float32 for either type of x: rounded to bfloat16 they would cost as much
// precision as the rounding of x itself.
void run(CudaStream&, const RopeRotate&);
// States, summaries and their gradients are float32 for either type of q, k and v; gates may be.
void run(CudaStream&, const MlstmForward&);
void run(CudaStream&, const MlstmBackward&);
void run(CudaStream&, const MlstmSummarise&);
void run(CudaStream&, const MlstmFold&);
void run(CudaStream&, const MlstmGradientSummarise&);
void run(CudaStream&, const MlstmGradientFold&);
void run(CudaStream&, const MlstmStep&);
void run(CudaStream&, const FeatureMapForward&);
// d_weight may be float32 beside bfloat16: what sums over a whole run should be.
void run(CudaStream&, const FeatureMapBackward&);
void run(CudaStream&, const BifocalGateForward&);
void run(CudaStream&, const BifocalGateBackward&);
// key_begin, pinned_begin and pinned_end lie on the device and are trusted. Head widths to 512; on
// tensor cores bfloat16 ones of 64, 128 and 256, of tensors on multiples of 16 bytes.
void run(CudaStream&, const SlidingAttentionForward&);
void run(CudaStream&, const SlidingAttentionBackward&);
// Views of caches lie on the host, their elements on the device.
void run(CudaStream&, const DecodeAttention&);
// A slot outside of the cache writes nothing and reads zeros.
void run(CudaStream&, const CacheWrite&);
void run(CudaStream&, const CacheRead&);

}  // namespace bifocal
