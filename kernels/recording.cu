// A recording is a CUDA graph.
#include <utility>
#include <vector>

#include "core/memory.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "ops/recording.h"

namespace bifocal {
namespace {

class CudaRecording : public Recording {
 public:
  CudaRecording(CudaStream& stream, const std::function<void()>& queue) : stream_(stream) {
    BIFOCAL_CUDA(cudaStreamBeginCapture(stream.handle(), cudaStreamCaptureModeThreadLocal));
    stream.keep_scratch(&scratch_);
    cudaGraph_t graph = nullptr;
    try {
      queue();
    } catch (...) {
      stream.keep_scratch(nullptr);
      cudaStreamEndCapture(stream.handle(), &graph);
      if (graph != nullptr) {
        cudaGraphDestroy(graph);
      }
      cudaGetLastError();  // of the capture: later checks must not see it
      throw;
    }
    stream.keep_scratch(nullptr);
    BIFOCAL_CUDA(cudaStreamEndCapture(stream.handle(), &graph));
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    BIFOCAL_CUDA(status);
  }

  // Replays may still be under way, and use the scratch.
  ~CudaRecording() override {
    cudaStreamSynchronize(stream_.handle());
    if (graph_ != nullptr) {
      cudaGraphExecDestroy(graph_);
    }
  }

  void replay() override { BIFOCAL_CUDA(cudaGraphLaunch(graph_, stream_.handle())); }

 private:
  CudaStream& stream_;
  cudaGraphExec_t graph_ = nullptr;
  std::vector<Tensor> scratch_;  // of the recorded ops, theirs for as long as they are replayed
};

}  // namespace

std::unique_ptr<Recording> record(CudaStream& stream, std::function<void()> queue) {
  return std::make_unique<CudaRecording>(stream, queue);
}

}  // namespace bifocal
