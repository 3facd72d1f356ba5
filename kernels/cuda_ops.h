// The ops that have CUDA kernels. Tensors lie on the stream's device, are float32 or bfloat16 and
// of one type in an op, except where said; arithmetic is float32, rounded once at each store.
// Other types throw Error. Nothing here waits for the device.
#pragma once

#include "kernels/cuda_stream.h"
#include "ops/adamw.h"
#include "ops/bifocal_gate.h"
#include "ops/elementwise.h"
#include "ops/feature_map.h"
#include "ops/mlstm.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
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

}  // namespace bifocal
