// The GPU of this rank of an MPI test, its communicator, and tensors that go there and back.
#pragma once

#include <cstring>
#include <memory>
#include <variant>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "core/memory.h"
#include "kernels/cuda_check.h"
#include "kernels/cuda_stream.h"
#include "kernels/nccl_communicator.h"
#include "parallel/backend.h"
#include "support/mpi_world.h"

namespace bifocal::test {

class GpuRank {
 public:
  GpuRank() {
    const std::unique_ptr<Communicator> node = test_world().split_node();
    backend_ = make_cuda_backend(node->rank(), 0);
    // A lone rank would get no NCCL; these tests want it, and one GPU is easier to have than two.
    world_ = test_world().size() == 1
                 ? make_nccl_communicator(stream(), memory(), test_world().split(0))
                 : backend_->communicator(test_world().split(0));
  }

  Communicator& world() { return *world_; }

  Backend& backend() { return *backend_; }

  Memory& memory() { return backend_->memory(); }

  CudaStream& stream() { return *std::get<CudaStream*>(backend_->stream().device); }

  Tensor empty(DType dtype, std::int64_t elements) {
    return memory().empty(Region::activations, dtype, {elements});
  }

  // Queued on the compute stream; waits, since `values` may go.
  void upload(const TensorView& target, const void* values) {
    BIFOCAL_CUDA(cudaMemcpyAsync(
        target.data, values, target.bytes(), cudaMemcpyHostToDevice, stream().handle()));
    stream().synchronize();
  }

  Tensor on_device(DType dtype, const std::vector<std::uint8_t>& values) {
    Tensor tensor = empty(dtype, static_cast<std::int64_t>(values.size() / size_of(dtype)));
    upload(tensor, values.data());
    return tensor;
  }

  // The bytes, once everything that was queued on the compute stream is done.
  std::vector<std::uint8_t> download(const ConstTensorView& source) {
    std::vector<std::uint8_t> values(source.bytes());
    BIFOCAL_CUDA(cudaMemcpyAsync(
        values.data(), source.data, source.bytes(), cudaMemcpyDeviceToHost, stream().handle()));
    stream().synchronize();
    return values;
  }

  // Work of some milliseconds: 1 GiB written again and again.
  void keep_busy(int passes) {
    constexpr std::size_t kBytes = std::size_t{1} << 30;
    const Tensor block = empty(DType::u8, kBytes);
    for (int pass = 0; pass < passes; ++pass) {
      BIFOCAL_CUDA(cudaMemsetAsync(block.view().data, pass, kBytes, stream().handle()));
    }
  }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Communicator> world_;
};

// One for the whole program, gone before MPI ends; null on a machine with fewer GPUs than ranks.
// nccl_test.cpp makes it.
inline std::unique_ptr<GpuRank>& gpu_rank_slot() {
  static std::unique_ptr<GpuRank> rank;
  return rank;
}

class GpuRankEnvironment final : public ::testing::Environment {
 public:
  void SetUp() override {
    int devices = 0;
    const bool has_driver = cudaGetDeviceCount(&devices) == cudaSuccess;
    if (has_driver && devices >= test_world().size()) {
      gpu_rank_slot() = std::make_unique<GpuRank>();
    }
  }

  void TearDown() override { gpu_rank_slot().reset(); }
};

// Skips where there are too few GPUs.
class GpuRanksTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!gpu_rank_slot()) {
      GTEST_SKIP() << "wants " << test_world().size() << " GPUs";
    }
  }

  static GpuRank& gpu() { return *gpu_rank_slot(); }

  static Communicator& world() { return gpu().world(); }
};

}  // namespace bifocal::test
