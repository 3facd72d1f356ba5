// The collective start; all else is the thread's.
#include "parallel/rank_watch.h"

#include "core/error.h"
#include "parallel/watch_thread.h"

namespace bifocal {

RankWatch::RankWatch() = default;
RankWatch::~RankWatch() = default;

void RankWatch::start(Communicator& world, const WatchLimits& limits) {
  BIFOCAL_ASSERT(!thread_);
  if (limits.heartbeat <= 0.0) {
    return;
  }
  const RankIdentity self{.rank = world.rank(), .host = host_name(), .process = this_process()};
  auto thread = std::make_unique<WatchThread>(self, world.size(), limits, progress_);
  std::string place;
  std::string error;
  const auto attempt = [&error](const auto& step) {
    try {
      step();
    } catch (const std::exception& failure) {
      error = failure.what();
    }
  };
  if (world.size() > 1) {
    if (self.rank == 0) {
      attempt([&] { place = thread->listen().dump(); });
    }
    require_all(world, error);
    if (self.rank == 0) {
      thread->run();  // it welcomes the others
    }
    place = broadcast_text(world, place, 0);
    if (self.rank != 0) {
      attempt([&] {
        thread->join(nlohmann::json::parse(place));
        thread->run();
      });
    }
    require_all(world, error);
  } else {
    thread->run();
  }
  thread_ = std::move(thread);
}

void RankWatch::announce_error(const std::string& text) {
  if (thread_) {
    thread_->announce_error(text);
  }
}

void RankWatch::end_job(const std::string& text) {
  if (thread_) {
    thread_->end_job(text);
  }
}

}  // namespace bifocal
