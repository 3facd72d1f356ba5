// Errors of runs in bfloat16 against golden values.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "support/golden_checks.h"

namespace bifocal::test {
namespace {

constexpr std::size_t kMany = 64;          // numbers, whose errors have a size of their own
constexpr double kRoundoff = 1.0 / 512.0;  // of bfloat16

// "grad_align" of "grad_align/model.norm.weight".
std::string kind_of(const std::string& name) {
  return name.substr(0, name.find('/'));
}

double norm_of(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) {
    sum += std::isinf(value) ? 0.0 : value * value;  // m of an empty state
  }
  return std::sqrt(sum);
}

double error_of(const GoldenValue& value) {
  double sum = 0.0;
  for (std::size_t i = 0; i < value.want.size(); ++i) {
    const double error = value.got[i] == value.want[i] ? 0.0 : value.got[i] - value.want[i];
    sum += error * error;
  }
  return std::sqrt(sum);
}

}  // namespace

std::map<std::string, double> golden_sizes(const GoldenValues& values) {
  std::map<std::string, double> largest;
  for (const auto& [name, value] : values) {
    double& most = largest[kind_of(name)];
    most = std::max(most, norm_of(value.want));
  }
  std::map<std::string, double> sizes;
  for (const auto& [name, value] : values) {
    sizes[name] = std::max(norm_of(value.want), 0.01 * largest.at(kind_of(name)));
  }
  return sizes;
}

double relative_error(const GoldenValue& value, double size) {
  const double error = error_of(value);
  return error == 0.0 ? 0.0 : error / size;
}

void RoundingErrors::compare(const std::filesystem::path& path,
                             const GoldenValues& device,
                             const GoldenValues& cpu) {
  ASSERT_EQ(device.size(), cpu.size()) << path.filename();
  const std::map<std::string, double> sizes = golden_sizes(cpu);
  for (const auto& [name, value] : device) {
    ASSERT_TRUE(cpu.contains(name)) << path.filename() << " " << name;
    const double got = relative_error(value, sizes.at(name));
    const double allowed = relative_error(cpu.at(name), sizes.at(name));
    EXPECT_TRUE(std::isfinite(got) && std::isfinite(allowed)) << path.filename() << " " << name;
    if (value.want.size() >= kMany || allowed == 0.0) {
      EXPECT_LE(got, 2.0 * allowed) << path.filename() << " " << name;
    } else {
      Pool& pool = pools_[kind_of(name)];
      pool.device += got * got;
      pool.cpu += allowed * allowed;
      ++pool.count;
    }
  }
}

void RoundingErrors::compare_pools() const {
  for (const auto& [kind, pool] : pools_) {
    const double got = std::sqrt(pool.device / pool.count);
    const double allowed = std::sqrt(pool.cpu / pool.count);
    EXPECT_LE(got, 2.0 * (allowed + kRoundoff))
        << kind << ": " << pool.count << " values of fewer than " << kMany << " numbers";
  }
}

}  // namespace bifocal::test
