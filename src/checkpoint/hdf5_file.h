// The HDF5 files of a checkpoint: one per rank with flat ranges, and one view of whole tensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <stop_token>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/manifest.h"
#include "core/hdf5_handle.h"

namespace bifocal {

// The dataset of the range that begins there: /tensors/<name>/<begin>.
std::string dataset_path(const std::string& name, std::int64_t begin);

// Writes a rank's ranges, each as a dataset with attributes shape, begin and end, and returns where
// their chunks lie, without their crc32. On return the file is closed and flushed to the disk.
// Empty ranges are left out. The HDF5 library is held for a chunk at a time, so that other threads
// can use it meanwhile. Throws Error when it is asked to stop.
std::vector<StoredRange> write_rank_file(const std::filesystem::path& path,
                                         std::int64_t step,
                                         int rank,
                                         const std::vector<ShardedTensor>& tensors,
                                         const std::stop_token& stop = {});

// Writes a file in which dataset /<name> is the whole tensor in its shape, mapped from the rank
// files that lie beside it. Where one of these is missing its elements read as NaN.
void write_view_file(const std::filesystem::path& path, const Manifest& manifest);

// A rank's file, open for reading.
class RankFile {
 public:
  explicit RankFile(const std::filesystem::path& path);

  // Fills `target` [n] with elements [begin, begin + n) of the tensor, which lie in the dataset
  // that starts at element `part_begin`. Converts between float32 and float64.
  void read(const std::string& name,
            std::int64_t part_begin,
            std::int64_t begin,
            const TensorView& target) const;

 private:
  Hdf5Handle file_;
};

}  // namespace bifocal
