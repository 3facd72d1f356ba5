// A thread for each piece of work: one a checkpoint costs nothing.
#include "checkpoint/background_task.h"

#include <exception>
#include <utility>

#include "core/error.h"

namespace bifocal {

void require_no_stop(const std::stop_token& stop) {
  BIFOCAL_REQUIRE(!stop.stop_requested(), "[checkpoint] given up: the run ends with an error");
}

void BackgroundTask::start(std::function<void(const std::stop_token&)> work) {
  BIFOCAL_ASSERT(is_done() && !thread_.joinable());
  error_.clear();
  is_done_.store(false, std::memory_order_relaxed);
  thread_ = std::jthread([this, work = std::move(work)](const std::stop_token& stop) {
    try {
      work(stop);
    } catch (const std::exception& caught) {
      error_ = caught.what();
      if (error_.empty()) {
        error_ = "unknown error";
      }
    }
    is_done_.store(true, std::memory_order_release);
  });
}

void BackgroundTask::wait() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

}  // namespace bifocal
