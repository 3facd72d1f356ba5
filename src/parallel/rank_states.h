// What is known of the ranks of a job, and whether it must end because of one of them. Pure rules:
// times are given, nothing is sent or printed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/process.h"
#include "core/progress.h"

namespace bifocal {

struct WatchLimits {
  double heartbeat = 50.0;  // seconds without a sign of a rank; 0: ranks are not watched
  // Seconds without progress of a rank, or ten times its job's longest step where that is more;
  // 0: no limit.
  double progress = 600.0;
};

struct RankIdentity {
  int rank = 0;
  std::string host;
  ProcessId process;
};

// Why a job ends.
struct RankFault {
  int rank = 0;      // that it ends because of
  std::string text;  // for people: some lines, the last with its line break
};

class RankStates {
 public:
  // own_host: of the process that judges, which can look at processes of its host.
  RankStates(int ranks, std::string own_host, const WatchLimits& limits);

  // Times are in seconds and never decrease. Only ranks that have joined are judged.
  void join(const RankIdentity& identity, double now);
  // A sign of the rank, which is at `state`.
  void beat(int rank, const ProgressState& state, double now);
  // It ends by an error of this text. Judged a second later: the judge may have the same error.
  void fail(int rank, const ProgressState& state, const std::string& error, double now);
  // Its connection closed without a farewell.
  void lose(int rank);
  // It has ended as it should.
  void leave(int rank);

  std::optional<RankFault> judge(double now) const;

 private:
  struct Record {
    RankIdentity identity;
    bool is_watched = false;
    bool is_lost = false;
    std::optional<std::string> error;
    double failed_at = 0.0;
    double heard_at = 0.0;
    ProgressState state;
    double marked_at = 0.0;   // when state.marks last changed
    double stepped_at = 0.0;  // when state.step last changed
  };

  Record& record(int rank) { return records_.at(static_cast<std::size_t>(rank)); }

  std::optional<RankFault> standstill(double now) const;
  RankFault fault_of(const Record& record, const char* what, const std::string& why) const;
  std::string silence(const Record& record) const;
  std::string places(double now) const;
  double progress_limit() const;

  std::string own_host_;
  WatchLimits limits_;
  std::vector<Record> records_;
  double longest_step_ = 0.0;
};

}  // namespace bifocal
