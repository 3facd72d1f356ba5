// A thread that ends the process when what it waits for from other ranks can no longer come.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime.h>

#include "core/process.h"

namespace bifocal {

// CUDA events without times, used again and again. Safe from several threads.
class EventPool {
 public:
  EventPool() = default;
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  cudaEvent_t take();
  void give(cudaEvent_t event);

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

// One operation from its call to its end on the device.
struct NcclOperation {
  enum class State : std::uint8_t { issuing, queued, abandoned };

  NcclOperation(EventPool& pool, const char* name, std::size_t bytes, int ranks);
  ~NcclOperation();
  NcclOperation(const NcclOperation&) = delete;
  NcclOperation& operator=(const NcclOperation&) = delete;

  // "all_gather of 1.00 MiB among 2 ranks"
  std::string describe() const;

  EventPool& pool;
  const char* name;
  std::size_t bytes;
  int ranks;
  cudaEvent_t started;  // both are recorded from State::queued on
  cudaEvent_t done;
  std::atomic<State> state = State::issuing;
};

// A communicator that is asked for errors which no call reported.
class NcclErrorSource {
 public:
  virtual ~NcclErrorSource() = default;
  // Empty: none, or the communicator is in use and will tell its user.
  virtual std::string asynchronous_error() = 0;
};

// Looks twice a second. Ends the process with exit status 1 and one line on stderr, which names
// this rank, its host and the operation, when
// - NCCL reports an error that no call of this process returned,
// - a peer on this host has ended for 5 s while an operation waits,
// - an operation has been running on the device for longer than the limit.
// Calls no MPI: the launcher ends the other ranks.
class NcclWatchdog {
 public:
  struct Peer {
    int rank = 0;
    ProcessId process;
  };

  // self: "rank 0 of 2 on HOST". Peers run on this host.
  NcclWatchdog(int device, std::string self, std::vector<Peer> peers, std::chrono::seconds limit);
  ~NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;

  // Operations are watched in the order in which the device runs them.
  void watch(std::shared_ptr<NcclOperation> operation);
  void add(NcclErrorSource& source);
  void remove(NcclErrorSource& source);

  std::chrono::seconds limit() const { return limit_; }

 private:
  using Clock = std::chrono::steady_clock;

  void loop();
  void check();
  std::string first_error();
  // The oldest operation that has not ended, once the device (or NCCL's set-up) is at it.
  std::shared_ptr<NcclOperation> running();
  const Peer* ended_peer() const;
  [[noreturn]] void end_process(const std::string& reason) const;

  int device_;
  std::string self_;
  std::vector<Peer> peers_;
  std::chrono::seconds limit_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::deque<std::shared_ptr<NcclOperation>> in_flight_;
  std::mutex sources_mutex_;
  std::vector<NcclErrorSource*> sources_;
  std::shared_ptr<NcclOperation> seen_;  // running at the last look, since running_since_
  Clock::time_point running_since_;
  std::optional<Clock::time_point> ended_since_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace bifocal
