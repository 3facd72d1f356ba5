// One piece of work beside the calling thread, at most one at a time.
#pragma once

#include <atomic>
#include <functional>
#include <stop_token>
#include <string>
#include <thread>

namespace bifocal {

// Throws Error if somebody waits for the work to end early.
void require_no_stop(const std::stop_token& stop);

// The work may not communicate: MPI is for the main thread.
class BackgroundTask {
 public:
  BackgroundTask() = default;
  // Asks the work to stop and waits until it does.
  ~BackgroundTask() = default;
  BackgroundTask(const BackgroundTask&) = delete;
  BackgroundTask& operator=(const BackgroundTask&) = delete;

  // The last work must have been waited for.
  void start(std::function<void(const std::stop_token&)> work);

  // Also true before the first start.
  bool is_done() const { return is_done_.load(std::memory_order_acquire); }

  void wait();

  // What the last work threw, as text; empty for nothing. It must be done.
  const std::string& error() const { return error_; }

 private:
  std::string error_;
  std::atomic<bool> is_done_ = true;
  std::jthread thread_;  // the last member: ends before what it uses
};

}  // namespace bifocal
