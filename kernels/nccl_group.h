// One NCCL communicator, and what all communicators of a process share.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <optional>

#include "core/memory.h"
#include "kernels/cuda_stream.h"
#include "kernels/nccl_library.h"
#include "kernels/nccl_watchdog.h"
#include "parallel/communicator.h"

namespace bifocal {

// One stream for all communicators of a process: operations then run in the order of their calls,
// which is the same on every rank, and cannot wait for each other in a circle.
class NcclContext {
 public:
  // Collective over host, all ranks of the run.
  NcclContext(CudaStream& compute, Memory& memory, Communicator& host);
  ~NcclContext();
  NcclContext(const NcclContext&) = delete;
  NcclContext& operator=(const NcclContext&) = delete;

  CudaStream& compute() const { return *compute_; }

  cudaStream_t stream() const { return stream_; }

  Memory& memory() const { return *memory_; }

  NcclWatchdog& watchdog() { return *watchdog_; }

  // An operation that starts once what is queued on the compute stream now has ended.
  std::shared_ptr<NcclOperation> begin(const char* name, std::size_t bytes, int ranks);
  // All of it is queued.
  void queued(NcclOperation& operation);
  // What is queued on the compute stream from now on starts after it.
  void join(const NcclOperation& operation);

 private:
  CudaStream* compute_;
  Memory* memory_;
  EventPool events_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ready_ = nullptr;
  std::optional<NcclWatchdog> watchdog_;
};

class NcclGroup final : public NcclErrorSource {
 public:
  // Collective over host. Throws the same Error on every rank.
  NcclGroup(std::shared_ptr<NcclContext> context, Communicator& host);
  // Waits for the other ranks; while an exception is in flight, and after an error, it does not.
  ~NcclGroup() override;
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  const std::shared_ptr<NcclContext>& context() const { return context_; }

  // issue(comm) returns what NCCL did; returns here once all is queued. Throws what NCCL reports.
  template <class Issue>
  void call(const char* what, const Issue& issue) {
    const std::lock_guard lock(mutex_);
    complete(issue(comm_), what);
  }

  // Throws what NCCL has reported since the last call.
  void check(const NcclOperation& operation);

  std::string asynchronous_error() override;

 private:
  // Polls until the call has ended. The caller holds the lock.
  void complete(ncclResult_t result, const char* what);
  ncclResult_t poll();

  std::shared_ptr<NcclContext> context_;
  int ranks_;
  std::mutex mutex_;  // NCCL allows one thread at a time, also to ask for errors
  ncclComm_t comm_ = nullptr;
  bool failed_ = false;
};

}  // namespace bifocal
