// Ends all ranks of a job when one of them cannot go on: a thread of each, which says where its
// rank stands, twice to half a time a second, and listens to the others.
#pragma once

#include <memory>
#include <string>

#include "core/progress.h"
#include "parallel/communicator.h"
#include "parallel/rank_states.h"

namespace bifocal {

class WatchThread;

// Each rank has a TCP connection to rank 0, over which beats go both ways; MPI is used in start()
// alone. The job ends when a connection breaks without a farewell (a rank was killed or crashed),
// when nothing is heard of a rank for limits.heartbeat, when a rank reports an error, and when a
// rank's progress stands still for too long. Rank 0 then prints which rank, where it stood and why;
// every process ends with exit status 1, from the thread, whatever the rank is doing. A rank that
// loses rank 0 ends too. Time during which a process was stopped does not count against the others.
class RankWatch {
 public:
  // Watches nothing yet.
  RankWatch();
  // Says farewell: of ranks that end from here on nobody thinks ill. After MPI_Finalize.
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Collective, once. Throws the same Error on every rank where one cannot reach rank 0. A rank
  // alone is watched for progress. Nothing is watched where limits.heartbeat is 0.
  void start(Communicator& world, const WatchLimits& limits);

  bool is_running() const { return thread_ != nullptr; }

  // Where this rank stands, for it to write. Progress is watched once something has begun.
  Progress& progress() { return progress_; }

  // This rank ends by an error. Tells rank 0 and returns when half a second has passed: rank 0 may
  // have the same error, prints it first, and ends this process meanwhile.
  void announce_error(const std::string& text);

  // After the error was printed. Rank 0: ends the others, and returns when they have ended, or
  // after 6 s. Others: rank 0 ends this process; returns where it has not done so after 8 s.
  void end_job(const std::string& text);

 private:
  Progress progress_;
  std::unique_ptr<WatchThread> thread_;
};

}  // namespace bifocal
