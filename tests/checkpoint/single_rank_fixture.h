// Checkpoints of one rank in a directory of the test's own.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_fixture.h"
#include "support/temporary_directory.h"

namespace bifocal {

namespace fs = std::filesystem;

// Each tensor cut into ranges that start at multiples of `stride`, added by `add`.
template <class Add>
Holdings cut(std::int64_t stride, Add add) {
  Holdings held;
  for (const KnownTensor& tensor : known_tensors()) {
    const std::int64_t n = tensor.shape.size();
    for (std::int64_t begin = 0; begin == 0 || begin < n; begin += stride) {
      add(held, tensor, begin, std::min(n, begin + stride));
    }
  }
  return held;
}

class CheckpointTest : public ::testing::Test {
 protected:
  void save(std::int64_t step,
            std::uint64_t seed,
            std::int64_t stride = 1000,
            const KeepRule& keep = {}) {
    Holdings held = cut(stride, [&](Holdings& to, const KnownTensor& tensor, auto begin, auto end) {
      to.add(tensor, begin, end, seed);
    });
    save_checkpoint(directory(), known_info(step), held.tensors(), keep, *own_group);
  }

  // Number of wrong elements.
  std::int64_t load(std::int64_t step, std::uint64_t seed, std::int64_t stride = 1000) {
    Holdings held = cut(stride, [](Holdings& to, const KnownTensor& tensor, auto begin, auto end) {
      to.add_empty(tensor, begin, end);
    });
    load_checkpoint(path(step), held.tensors(), *own_group);
    return held.wrong(seed);
  }

  // The text of the Error that loading throws; empty if it throws none.
  std::string load_error(std::int64_t step) {
    try {
      load(step, 1);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  std::string save_error(std::int64_t step, std::vector<ShardedTensor>& tensors) {
    try {
      save_checkpoint(directory(), known_info(step), tensors, {}, *own_group);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  fs::path directory() const { return scratch.path(); }

  fs::path path(std::int64_t step) const { return directory() / ("step_" + std::to_string(step)); }

  test::TemporaryDirectory scratch;
  std::unique_ptr<Communicator> own_group = make_self_communicator();
};

inline void overwrite(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string with_flip(std::string bytes, std::size_t at) {
  bytes[at] = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
  return bytes;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace bifocal
