// The course of a save: begin, write, agree, publish.
#include "checkpoint/checkpoint_writer.h"

#include <system_error>
#include <utility>

#include "checkpoint/file_hash.h"
#include "checkpoint/hdf5_file.h"
#include "checkpoint/run_together.h"
#include "checkpoint/step_directory.h"
#include "core/file.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

std::string rank_file_name(int rank) {
  return fmt::format("rank_{:05}.h5", rank);
}

// Writes a rank's file and tells what the manifest says of it.
std::string write_and_describe(const fs::path& path,
                               std::int64_t step,
                               int rank,
                               const std::vector<ShardedTensor>& tensors,
                               const std::stop_token& stop) {
  std::vector<StoredRange> ranges = write_rank_file(path, step, rank, tensors, stop);
  fsync_directory(path.parent_path());
  std::vector<FilePiece> pieces;
  for (const StoredRange& range : ranges) {
    for (const StoredChunk& chunk : range.chunks) {
      pieces.push_back({chunk.offset, chunk.bytes});
    }
  }
  const FileHashes hashes = hash_file(path, pieces, stop);
  auto crc32 = hashes.crc32.begin();
  for (StoredRange& range : ranges) {
    for (StoredChunk& chunk : range.chunks) {
      BIFOCAL_REQUIRE(crc32->has_value(),
                      "[checkpoint] {} lost bytes of {} when it was closed",
                      path.string(),
                      range.name);
      chunk.crc32 = **crc32++;
    }
  }
  return describe({path.filename().string(), hashes.bytes, hashes.sha256}, ranges);
}

}  // namespace

CheckpointWriter::CheckpointWriter(fs::path directory, const KeepRule& keep, Communicator& group)
    : directory_(std::move(directory)), keep_(keep), group_(&group) {}

// Every rank fails alike: `work` throws what run_together and require_all throw.
template <class Work>
void CheckpointWriter::or_give_up(const Work& work) {
  try {
    work();
  } catch (const Error&) {
    phase_ = Phase::idle;
    // What is left is not a checkpoint, but its space may be what is wanted.
    if (group_->rank() == 0) {
      std::error_code ignored;
      fs::remove_all(unfinished_path(directory_, manifest_.info.step), ignored);
    }
    throw;
  }
}

void CheckpointWriter::start(const CheckpointInfo& info,
                             const std::vector<ShardedTensor>& tensors) {
  BIFOCAL_ASSERT(!is_pending());
  watch_.restart();
  manifest_ = {.info = info, .ranks = group_->size(), .files = {}, .tensors = {}};
  const fs::path unfinished = unfinished_path(directory_, info.step);
  const int rank = group_->rank();
  or_give_up([&] {
    std::string description;
    run_together(*group_, [&] {
      BIFOCAL_REQUIRE(
          info.step >= 0, "[checkpoint] wanted a step of at least 0, got {}", info.step);
      description = describe(tensors);
      if (rank == 0) {
        fs::create_directories(directory_);
        remove_unfinished(directory_);
      }
    });
    const std::vector<std::string> descriptions = gather_texts(*group_, description);
    run_together(*group_, [&] {
      manifest_.tensors = join(descriptions);
      fs::create_directory(unfinished);
    });
  });
  phase_ = Phase::writing;
  task_.start([this, unfinished, rank, step = info.step, tensors](const std::stop_token& stop) {
    written_ = write_and_describe(unfinished / rank_file_name(rank), step, rank, tensors, stop);
  });
}

std::optional<SaveReport> CheckpointWriter::advance(bool waits) {
  if (phase_ == Phase::writing && is_done_everywhere(waits)) {
    begin_publishing();
  }
  if (phase_ == Phase::publishing && is_done_everywhere(waits)) {
    return end_save();
  }
  return std::nullopt;
}

bool CheckpointWriter::is_done_everywhere(bool waits) {
  if (!waits) {
    std::int64_t busy = task_.is_done() ? 0 : 1;
    group_->all_reduce_sum({&busy, DType::i64, {1}});
    if (busy > 0) {
      return false;
    }
  }
  task_.wait();
  return true;
}

void CheckpointWriter::begin_publishing() {
  or_give_up([&] { require_all(*group_, task_.error()); });
  add_files(manifest_, gather_texts(*group_, written_));
  phase_ = Phase::publishing;
  if (group_->rank() == 0) {
    task_.start([this](const std::stop_token&) { publish(manifest_); });
  }
}

void CheckpointWriter::publish(const Manifest& manifest) const {
  const std::int64_t step = manifest.info.step;
  const fs::path unfinished = unfinished_path(directory_, step);
  write_view_file(unfinished / "checkpoint.h5", manifest);
  write_file_atomically(unfinished / kManifestName, to_text(manifest));
  publish_step(directory_, step);
  remove_old_steps(directory_, keep_, step);
}

SaveReport CheckpointWriter::end_save() {
  or_give_up([&] { require_all(*group_, group_->rank() == 0 ? task_.error() : std::string()); });
  phase_ = Phase::idle;
  SaveReport report{.step = manifest_.info.step, .seconds = watch_.seconds()};
  for (const ManifestFile& file : manifest_.files) {
    report.bytes += file.bytes;
  }
  return report;
}

}  // namespace bifocal
