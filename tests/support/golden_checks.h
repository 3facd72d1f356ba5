// Golden comparisons that hold for any number of ranks: run by one rank in the unit tests, by 1 to
// 4 in the MPI tests.
#pragma once

#include <filesystem>

#include "core/dtype.h"
#include "model/block.h"
#include "parallel/backend.h"
#include "parallel/communicator.h"

namespace bifocal::test {

// One mixer, its row cut over the group: heads, output, final state and every gradient. The group
// is of the backend; the second computes on the CPU.
void check_golden_mixer(const std::filesystem::path& path,
                        DType dtype,
                        Communicator& group,
                        Backend& backend);
void check_golden_mixer(const std::filesystem::path& path, DType dtype, Communicator& group);

struct GoldenModelRun {
  DType dtype = DType::f64;
  Recompute recompute = Recompute::none;
  bool sharded_weights = false;
  bool ulysses = false;  // else look-ahead
};

// One tiny teacher and student, the row cut over all ranks of the world: both losses, every
// gradient, the variant with temperature and cross-entropy, and ten AdamW steps. Collective;
// consumes the world's groups only while it runs. The world is of the backend; the second computes
// on the CPU.
void check_golden_model(const std::filesystem::path& path,
                        const GoldenModelRun& run,
                        std::unique_ptr<Communicator> world,
                        Backend& backend);
void check_golden_model(const std::filesystem::path& path,
                        const GoldenModelRun& run,
                        std::unique_ptr<Communicator> world);

}  // namespace bifocal::test
