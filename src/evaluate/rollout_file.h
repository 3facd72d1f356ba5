// Sampled answers on disk: lines of a rollouts file, and the directory that a run of them fills.
//
// A run directory holds run.json (what was asked for), part-0000.jsonl.. while the run is going on,
// one per rank that ever wrote, and rollouts.jsonl once every sample is there: a line per sample,
// by problem and sample, the same bytes however the run was cut over ranks and restarts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "evaluate/grade.h"
#include "evaluate/problem_set.h"
#include "parallel/communicator.h"

namespace bifocal {

// {"id", "sample", "answer" (where there is text), "answer_ids", "tokens", "finish_reason"} without
// a line break. Text that is not UTF-8 has U+FFFD in place of what is wrong.
std::string rollout_line(const Rollout& rollout);

// Reads such a line; answer or answer_ids may be missing, tokens where there are answer_ids. Throws
// Error for a missing or wrong field.
Rollout parse_rollout(const nlohmann::json& line);

// The lines of a rollouts file, or of a finished run directory. Throws Error for an unfinished one,
// and for a file with the same sample of a problem twice.
std::vector<Rollout> read_rollouts(const std::filesystem::path& path);

// The settings in the run.json of a run directory, or of the directory around a rollouts file; null
// where there is none.
nlohmann::json rollout_settings(const std::filesystem::path& path);

// A run directory while it is filled. Every member function is collective unless it says otherwise.
class RolloutDirectory {
 public:
  // Creates the directory, or takes up what an earlier run left in it: torn last lines are cut off,
  // finished samples stay. settings: an object; everything that samples depend on. origin: an
  // object with commit (of the program); kept beside the settings, may change. Both are read on
  // rank 0 alone. Throws Error on all ranks where the directory was made with other settings, holds
  // what is no run, or is in use by another run.
  RolloutDirectory(Communicator& world,
                   const std::filesystem::path& path,
                   const ProblemSet& problems,
                   std::int64_t samples,
                   const nlohmann::ordered_json& settings,
                   const nlohmann::ordered_json& origin);
  ~RolloutDirectory() = default;
  RolloutDirectory(const RolloutDirectory&) = delete;
  RolloutDirectory& operator=(const RolloutDirectory&) = delete;
  RolloutDirectory(RolloutDirectory&&) = delete;
  RolloutDirectory& operator=(RolloutDirectory&&) = delete;

  // [problems * samples]: 1 where the sample was there when the directory was opened.
  const std::vector<std::uint8_t>& done() const { return done_; }

  // Whether an earlier run in this directory was of another commit. Of rank 0 alone.
  bool has_other_commits() const { return has_other_commits_; }

  // Appends a line to this rank's part. Not collective. A process that is killed later loses
  // nothing of it.
  void append(const Rollout& rollout);

  // Writes rollouts.jsonl from all parts and removes them. Throws Error naming a sample that is
  // missing.
  void merge();

 private:
  void open_on_rank_zero(const nlohmann::ordered_json& settings,
                         const nlohmann::ordered_json& origin);
  void check_run_file(const nlohmann::ordered_json& settings, const nlohmann::ordered_json& origin);
  void read_parts();
  void write_merged();
  std::vector<std::filesystem::path> line_files() const;
  std::size_t place_of(const Rollout& rollout) const;

  // A descriptor, closed at the end; -1: none.
  struct OpenFile {
    OpenFile() = default;
    ~OpenFile();
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;

    // What was written is on the disk then. Throws Error where it is not.
    void close();

    int number = -1;
  };

  // Where a sample's line lies.
  struct Line {
    std::int64_t file = -1;  // in line_files(); -1: nowhere
    std::int64_t begin = 0;
    std::int64_t bytes = 0;
  };

  std::vector<Line> find_lines() const;

  Communicator* world_;
  std::filesystem::path path_;
  const ProblemSet* problems_;
  std::int64_t samples_;
  std::vector<std::uint8_t> done_;
  bool has_other_commits_ = false;
  OpenFile lock_;  // of rank 0: the directory, locked
  OpenFile part_;  // this rank's part, for appending
};

}  // namespace bifocal
