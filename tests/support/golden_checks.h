// Golden comparisons that hold for any number of ranks: run by one rank in the unit tests, by 1 to
// 4 in the MPI tests.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

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

// What a run has for each golden value, by names.
struct GoldenValue {
  std::vector<double> got, want;
};

using GoldenValues = std::map<std::string, GoldenValue>;

// The same on one rank, unjudged.
GoldenValues golden_mixer_values(const std::filesystem::path& path,
                                 DType dtype,
                                 Communicator& group,
                                 Backend& backend);

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

// The same on one rank, unjudged.
GoldenValues golden_model_values(const std::filesystem::path& path,
                                 const GoldenModelRun& run,
                                 std::unique_ptr<Communicator> world,
                                 Backend& backend);

// What errors of each value are relative to: the norm of what is wanted, or 1 % of the largest such
// norm among values of its kind ("grad_align" of "grad_align/model.norm.weight") if that is more.
std::map<std::string, double> golden_sizes(const GoldenValues& values);

// Norm of the error by size.
double relative_error(const GoldenValue& value, double size);

// Runs of bfloat16 on a device against those on the CPU, which rounds at the same stores but
// computes in double between them (ops/widened.h): a device's error is at most twice the CPU's.
// Values of few numbers, whose error may happen to be small, are judged together: those of a kind
// in all files.
class RoundingErrors {
 public:
  void compare(const std::filesystem::path& path,
               const GoldenValues& device,
               const GoldenValues& cpu);
  void compare_pools() const;

 private:
  // Sums of squares of relative errors.
  struct Pool {
    double device = 0.0, cpu = 0.0;
    int count = 0;
  };

  std::map<std::string, Pool> pools_;
};

}  // namespace bifocal::test
