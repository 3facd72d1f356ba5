// The stages of the mLSTM's backward pass on Hopper, for their times.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda_stream.h"
#include "ops/mlstm.h"

namespace bifocal::test {

struct MlstmStage {
  std::string name;
  double bytes;  // that it must move
  std::function<void()> run;
};

// Of an op in bfloat16 without states at the row's ends; empty where Hopper's kernels do not serve.
// Its tensors and the stream outlive the stages, which are to be run in order at first.
std::vector<MlstmStage> mlstm_backward_stages(CudaStream& stream, const MlstmBackward& op);

}  // namespace bifocal::test
