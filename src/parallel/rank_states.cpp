// The order of the rules is that of certainty: what a rank said, what the system said, silence,
// standstill.
#include "parallel/rank_states.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace bifocal {

namespace {

// After an error of a rank: the judge's own error, which all ranks may share, comes within this
// time and is told instead.
constexpr double kErrorPause = 1.0;

// "a, b" below each other, behind the width of "  why:   ".
std::string indented(std::string text) {
  for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 1)) {
    text.insert(at + 1, 9, ' ');
  }
  return text;
}

}  // namespace

RankStates::RankStates(int ranks, std::string own_host, const WatchLimits& limits)
    : own_host_(std::move(own_host)), limits_(limits), records_(static_cast<std::size_t>(ranks)) {}

void RankStates::join(const RankIdentity& identity, double now) {
  Record& joined = record(identity.rank);
  joined = {.identity = identity,
            .is_watched = true,
            .heard_at = now,
            .marked_at = now,
            .stepped_at = now};
}

void RankStates::beat(int rank, const ProgressState& state, double now) {
  Record& of = record(rank);
  of.heard_at = now;
  if (state.marks != of.state.marks) {
    of.marked_at = now;
  }
  if (state.step != of.state.step) {
    // From one begin to the next; what lies before the first is no step.
    if (of.state.step > 0) {
      longest_step_ = std::max(longest_step_, now - of.stepped_at);
    }
    of.stepped_at = now;
  }
  of.state = state;
}

void RankStates::fail(int rank, const ProgressState& state, const std::string& error, double now) {
  Record& of = record(rank);
  of.state = state;
  of.error = error;
  of.failed_at = now;
}

void RankStates::lose(int rank) {
  record(rank).is_lost = true;
}

void RankStates::leave(int rank) {
  record(rank).is_watched = false;
}

std::optional<RankFault> RankStates::judge(double now) const {
  for (const Record& of : records_) {
    if (of.is_watched && of.error) {
      // Of a rank that fails more will be heard, and of those that follow it.
      return now - of.failed_at < kErrorPause
                 ? std::nullopt
                 : std::optional(fault_of(of, "has failed", *of.error));
    }
  }
  for (const Record& of : records_) {
    if (of.is_watched && of.is_lost) {
      return fault_of(
          of,
          "is gone",
          "its connection closed without a word: something killed it (the kernel, where "
          "memory ran out: see dmesg), or it crashed");
    }
  }
  for (const Record& of : records_) {
    if (of.is_watched && now - of.heard_at >= limits_.heartbeat) {
      return fault_of(of, "does not answer", silence(of));
    }
  }
  return standstill(now);
}

std::string RankStates::silence(const Record& of) const {
  const std::string seconds =
      fmt::format("nothing was heard of it for {:.0f} s: ", limits_.heartbeat);
  if (of.identity.host != own_host_) {
    return seconds + "it is stopped, or its host is down or cut off from this one";
  }
  return seconds + (is_stopped(of.identity.process) ? "it is stopped (SIGSTOP, a debugger)"
                                                    : "its process does not get to run");
}

double RankStates::progress_limit() const {
  constexpr double kLongestSteps = 10.0;
  return std::max(limits_.progress, kLongestSteps * longest_step_);
}

// Others soon wait for the rank that stands still. It is the one that has begun least.
std::optional<RankFault> RankStates::standstill(double now) const {
  if (limits_.progress <= 0.0) {
    return std::nullopt;
  }
  const Record* behind = nullptr;
  bool stands = false;
  for (const Record& of : records_) {
    if (!of.is_watched || of.state.marks == 0) {
      continue;
    }
    stands = stands || now - of.marked_at >= progress_limit();
    if (behind == nullptr || std::pair(of.state.step, of.state.marks) <
                                 std::pair(behind->state.step, behind->state.marks)) {
      behind = &of;
    }
  }
  if (!stands) {
    return std::nullopt;
  }
  return fault_of(*behind,
                  "stands still",
                  fmt::format("no progress for {:.0f} s, of which {:.0f} s are allowed "
                              "(run.progress_seconds, or 10 x the longest step)",
                              now - behind->marked_at,
                              progress_limit()) +
                      places(now));
}

// Where each rank is, of jobs that are not too large to read.
std::string RankStates::places(double now) const {
  constexpr std::size_t kMostRanks = 16;
  std::string text;
  if (records_.size() < 2 || records_.size() > kMostRanks) {
    return text;
  }
  for (const Record& of : records_) {
    if (of.is_watched) {
      text += fmt::format(
          "\nrank {}: {} for {:.0f} s", of.identity.rank, describe(of.state), now - of.marked_at);
    }
  }
  return text;
}

RankFault RankStates::fault_of(const Record& of, const char* what, const std::string& why) const {
  return {.rank = of.identity.rank,
          .text = fmt::format("bifocal: rank {} of {} {}, and the job ends\n"
                              "  host:  {} (process {})\n"
                              "  place: {}\n"
                              "  why:   {}\n",
                              of.identity.rank,
                              records_.size(),
                              what,
                              of.identity.host,
                              of.identity.process.number,
                              describe(of.state),
                              indented(why))};
}

}  // namespace bifocal
