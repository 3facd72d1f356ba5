// Saves beside the training: a thread of each rank writes, the main threads agree.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/background_task.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/log.h"

namespace bifocal {

// A save that is complete.
struct SaveReport {
  std::int64_t step = 0;
  std::int64_t bytes = 0;  // of all rank files
  double seconds = 0.0;    // from start() until every rank knew that it was complete
};

// Every call is collective over the group and belongs to the main thread; one save at a time. When
// a save fails, the call that sees it throws the same Error on every rank, the unfinished directory
// is gone and earlier checkpoints are untouched.
class CheckpointWriter {
 public:
  // The group must outlive it; see save_checkpoint for the others.
  CheckpointWriter(std::filesystem::path directory, const KeepRule& keep, Communicator& group);
  // Not collective: gives up a save in progress, of which no checkpoint comes; one that all ranks
  // have written and rank 0 publishes is completed.
  ~CheckpointWriter() = default;
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Checks what the ranks hold and begins to write it. The tensors' data may not change or go until
  // the save is no longer pending. None may be pending.
  void start(const CheckpointInfo& info, const std::vector<ShardedTensor>& tensors);

  // Whether the pending save has become complete, without waiting for files: a sum of a few bytes
  // over the ranks. Nothing where none is pending.
  std::optional<SaveReport> poll() { return advance(false); }

  // Waits until the pending save is complete. Nothing where none is pending.
  std::optional<SaveReport> finish() { return advance(true); }

  bool is_pending() const { return phase_ != Phase::idle; }

 private:
  enum class Phase : std::uint8_t {
    idle,
    writing,    // every rank its file
    publishing  // rank 0 the manifest, then the names
  };

  std::optional<SaveReport> advance(bool waits);
  bool is_done_everywhere(bool waits);
  void begin_publishing();
  void publish(const Manifest& manifest) const;
  SaveReport end_save();
  template <class Work>
  void or_give_up(const Work& work);

  std::filesystem::path directory_;
  KeepRule keep_;
  Communicator* group_;
  Phase phase_ = Phase::idle;
  Manifest manifest_;
  Stopwatch watch_;
  std::string written_;  // describes this rank's file, once it is there
  BackgroundTask task_;  // ends before what it uses
};

}  // namespace bifocal
