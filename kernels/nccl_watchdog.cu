// The looks of the watchdog.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/memory.h"
#include "kernels/cuda_check.h"
#include "kernels/nccl_watchdog.h"

namespace bifocal {

EventPool::~EventPool() {
  for (cudaEvent_t event : free_) {
    cudaEventDestroy(event);
  }
}

cudaEvent_t EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      cudaEvent_t event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  BIFOCAL_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

void EventPool::give(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

NcclOperation::NcclOperation(EventPool& events, const char* label, std::size_t size, int members)
    : pool(events),
      name(label),
      bytes(size),
      ranks(members),
      started(events.take()),
      done(events.take()) {}

NcclOperation::~NcclOperation() {
  pool.give(started);
  pool.give(done);
}

std::string NcclOperation::describe() const {
  return fmt::format(
      "{} of {} among {} ranks", name, format_bytes(static_cast<double>(bytes)), ranks);
}

NcclWatchdog::NcclWatchdog(int device,
                           std::string self,
                           std::vector<Peer> peers,
                           std::chrono::seconds limit)
    : device_(device), self_(std::move(self)), peers_(std::move(peers)), limit_(limit) {
  thread_ = std::thread([this] { loop(); });
}

NcclWatchdog::~NcclWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void NcclWatchdog::watch(std::shared_ptr<NcclOperation> operation) {
  const std::lock_guard lock(mutex_);
  in_flight_.push_back(std::move(operation));
}

void NcclWatchdog::add(NcclErrorSource& source) {
  const std::lock_guard lock(sources_mutex_);
  sources_.push_back(&source);
}

void NcclWatchdog::remove(NcclErrorSource& source) {
  const std::lock_guard lock(sources_mutex_);
  std::erase(sources_, &source);
}

void NcclWatchdog::loop() {
  cudaSetDevice(device_);
  // Queries of events must not break a capture of the main thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  constexpr std::chrono::milliseconds kPause{500};
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kPause, [this] { return stop_; })) {
    lock.unlock();
    check();
    lock.lock();
  }
}

void NcclWatchdog::check() {
  if (const std::string error = first_error(); !error.empty()) {
    end_process(error);
  }
  const std::shared_ptr<NcclOperation> operation = running();
  const Clock::time_point now = Clock::now();
  if (operation != seen_) {
    seen_ = operation;
    running_since_ = now;
  }
  if (!operation) {
    ended_since_.reset();
    return;
  }
  constexpr std::chrono::seconds kGrace{5};  // what an ended rank had sent may still arrive
  if (const Peer* peer = ended_peer(); peer == nullptr) {
    ended_since_.reset();
  } else if (!ended_since_) {
    ended_since_ = now;
  } else if (now - *ended_since_ >= kGrace) {
    end_process(fmt::format("rank {} (process {} on this host) has ended while {} waits for it",
                            peer->rank,
                            peer->process.number,
                            operation->describe()));
  }
  if (now - running_since_ >= limit_) {
    end_process(
        fmt::format("{} has not ended within {} s: another rank has stopped or is far "
                    "behind; see what it printed, or raise BIFOCAL_NCCL_TIMEOUT",
                    operation->describe(),
                    limit_.count()));
  }
}

std::string NcclWatchdog::first_error() {
  const std::lock_guard lock(sources_mutex_);
  for (NcclErrorSource* source : sources_) {
    if (std::string error = source->asynchronous_error(); !error.empty()) {
      return error;
    }
  }
  return {};
}

std::shared_ptr<NcclOperation> NcclWatchdog::running() {
  const std::lock_guard lock(mutex_);
  while (!in_flight_.empty()) {
    const NcclOperation& oldest = *in_flight_.front();
    const NcclOperation::State state = oldest.state.load(std::memory_order_acquire);
    if (state == NcclOperation::State::issuing) {
      return in_flight_.front();
    }
    if (state == NcclOperation::State::queued && cudaEventQuery(oldest.done) == cudaErrorNotReady) {
      // Not started: the device is still busy with what comes before.
      const bool is_started = cudaEventQuery(oldest.started) != cudaErrorNotReady;
      return is_started ? in_flight_.front() : nullptr;
    }
    in_flight_.pop_front();
  }
  return nullptr;
}

const NcclWatchdog::Peer* NcclWatchdog::ended_peer() const {
  const auto found = std::find_if(
      peers_.begin(), peers_.end(), [](const Peer& peer) { return !is_running(peer.process); });
  return found == peers_.end() ? nullptr : &*found;
}

void NcclWatchdog::end_process(const std::string& reason) const {
  std::fflush(stdout);
  std::fputs(fmt::format("[nccl] {}: {}\n", self_, reason).c_str(), stderr);
  std::fflush(stderr);
  std::_Exit(EXIT_FAILURE);
}

}  // namespace bifocal
