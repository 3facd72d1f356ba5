// A reader, workers and a writer, with the outcome of a single thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace bifocal {

struct PipelineLimits {
  std::size_t workers = 1;
  // Items between produce and consume at one time: at most `items`, and no further one once they
  // weigh `weight` together.
  std::size_t items = 4;
  std::size_t weight = static_cast<std::size_t>(-1);
};

// Calls consume(transform(item)) for each item that produce gives until it gives none. produce runs
// on a thread of its own, transform on `workers` threads, consume on the calling one, in the order
// of production. idle runs on the calling thread before each item and at least ten times a second
// while it waits. The first error in the order of the items ends everything and is thrown when all
// threads have ended: what a single thread would have thrown.
// Item has weight(), in any unit.
template <class Item, class Result>
class OrderedPipeline {
 public:
  using Produce = std::function<std::optional<Item>()>;
  using Transform = std::function<Result(const Item&)>;
  using Consume = std::function<void(Result&&)>;
  using Idle = std::function<void()>;

  static void run(const PipelineLimits& limits,
                  const Produce& produce,
                  const Transform& transform,
                  const Consume& consume,
                  const Idle& idle) {
    OrderedPipeline pipeline(limits);
    std::vector<std::jthread> threads;  // joined before the pipeline goes
    const Stopper stopper(pipeline);    // before they are joined
    threads.emplace_back([&] { pipeline.read(produce); });
    for (std::size_t i = 0; i < limits.workers; ++i) {
      threads.emplace_back([&] { pipeline.work(transform); });
    }
    pipeline.write(consume, idle);
  }

 private:
  struct Slot {
    std::optional<Item> item;
    std::size_t weight = 0;
    std::optional<Result> result;
    std::exception_ptr error;
    bool is_done = false;
  };

  // Tells all threads to end when the caller leaves, by an error too.
  class Stopper {
   public:
    explicit Stopper(OrderedPipeline& pipeline) : pipeline_(&pipeline) {}

    ~Stopper() {
      const std::lock_guard lock(pipeline_->mutex_);
      pipeline_->is_stopped_ = true;
      pipeline_->room_.notify_all();
      pipeline_->work_.notify_all();
    }

    Stopper(const Stopper&) = delete;
    Stopper& operator=(const Stopper&) = delete;
    Stopper(Stopper&&) = delete;
    Stopper& operator=(Stopper&&) = delete;

   private:
    OrderedPipeline* pipeline_;
  };

  explicit OrderedPipeline(const PipelineLimits& limits) : limits_(limits) {}

  void read(const Produce& produce) {
    for (bool has_more = true; has_more;) {
      {
        std::unique_lock lock(mutex_);
        room_.wait(lock, [&] {
          const bool has_room = slots_.size() < limits_.items && weight_ < limits_.weight;
          return is_stopped_ || slots_.empty() || has_room;
        });
        if (is_stopped_) {
          return;
        }
      }
      Slot slot;
      try {
        slot.item = produce();
        has_more = slot.item.has_value();
        slot.weight = has_more ? slot.item->weight() : 0;
      } catch (...) {
        slot.error = std::current_exception();
        slot.is_done = true;
        has_more = false;
      }
      const std::lock_guard lock(mutex_);
      is_read_ = !has_more;
      if (slot.item || slot.error) {
        weight_ += slot.weight;
        slots_.push_back(std::move(slot));
      }
      work_.notify_one();
      done_.notify_one();
    }
  }

  void work(const Transform& transform) {
    while (true) {
      Slot* slot = nullptr;
      {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [&] { return is_stopped_ || has_work(); });
        if (is_stopped_) {
          return;
        }
        slot = &slots_[claimed_++];  // a deque keeps its elements where they are
      }
      std::optional<Result> result;
      std::exception_ptr error;
      try {
        result = transform(*slot->item);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(mutex_);
      slot->result = std::move(result);
      slot->error = error;
      slot->is_done = true;
      done_.notify_one();
    }
  }

  bool has_work() const { return claimed_ < slots_.size() && !slots_[claimed_].is_done; }

  void write(const Consume& consume, const Idle& idle) {
    constexpr std::chrono::milliseconds kWait{100};
    while (true) {
      idle();
      Slot slot;
      {
        std::unique_lock lock(mutex_);
        const bool is_ready = done_.wait_for(
            lock, kWait, [&] { return slots_.empty() ? is_read_ : slots_.front().is_done; });
        if (!is_ready) {
          continue;
        }
        if (slots_.empty()) {
          return;
        }
        slot = std::move(slots_.front());
        slots_.pop_front();
        // The slot of an error that produce threw was claimed by nobody.
        claimed_ -= claimed_ > 0 ? 1 : 0;
        weight_ -= slot.weight;
        room_.notify_one();
      }
      if (slot.error) {
        std::rethrow_exception(slot.error);
      }
      consume(std::move(*slot.result));
    }
  }

  const PipelineLimits limits_;
  std::mutex mutex_;
  std::condition_variable room_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<Slot> slots_;   // in the order of production
  std::size_t claimed_ = 0;  // slots at the front that workers have taken
  std::size_t weight_ = 0;   // of all slots
  bool is_read_ = false;     // produce has nothing more
  bool is_stopped_ = false;
};

}  // namespace bifocal
