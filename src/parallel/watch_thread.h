// The thread of a rank that watches over the job. See rank_watch.h.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/progress.h"
#include "parallel/message_socket.h"
#include "parallel/rank_states.h"

namespace bifocal {

// Rank 0's hears all ranks and judges them; another's hears rank 0 alone. It owns the connections;
// the main thread asks it for things by way of requests.
class WatchThread {
 public:
  WatchThread(RankIdentity self, int ranks, const WatchLimits& limits, Progress& progress);
  // Says farewell.
  ~WatchThread();
  WatchThread(const WatchThread&) = delete;
  WatchThread& operator=(const WatchThread&) = delete;

  // Rank 0 of several: where the others find it. Throws Error.
  nlohmann::json listen();
  // Other ranks: connects to rank 0, which says so. Throws Error with what each address answered.
  void join(const nlohmann::json& place);
  // Once, after these.
  void run();

  // As RankWatch's.
  void announce_error(const std::string& text);
  void end_job(const std::string& text);

 private:
  enum class Request : std::uint8_t { none, error, end, farewell };
  using Clock = std::chrono::steady_clock;

  void ask(Request request, const std::string& text);
  void loop();
  // False: all is done.
  bool look();
  void wait();
  void advance();
  void accept();
  void welcome(std::size_t guest);
  void hear(int rank);
  void hear_message(int rank, const nlohmann::json& message);
  void beat();
  bool serve_request();
  void tell_all(const nlohmann::json& message);
  void wait_for_ends();
  void say_farewell();
  [[noreturn]] void end_with(const RankFault& fault);
  [[noreturn]] void follow(const nlohmann::json& message);

  RankIdentity self_;
  int ranks_;
  WatchLimits limits_;
  Progress* progress_;
  RankStates states_;
  std::vector<std::optional<MessageSocket>> peers_;  // by rank: those heard
  std::vector<MessageSocket> guests_;                // have not said who they are
  std::optional<Listener> listener_;                 // until all have joined
  std::string token_;
  int joined_ = 1;
  Clock::time_point looked_at_ = Clock::now();
  double watched_ = 0.0;  // seconds in which this process was not stopped itself
  // The last beat: in watched seconds, and what it told.
  double told_at_ = -1.0;
  std::uint64_t told_marks_ = 0;
  Descriptor wake_;  // readable when there is a request
  bool has_announced_ = false;

  std::mutex mutex_;
  std::condition_variable done_;
  Request request_ = Request::none;
  std::string request_text_;
  bool is_done_ = false;  // what was asked for last
  std::thread thread_;
};

}  // namespace bifocal
