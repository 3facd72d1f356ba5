// The largest resident memory of this process since a moment.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>

namespace bifocal::test {

class PeakMemory {
 public:
  PeakMemory() {
    std::ofstream reset("/proc/self/clear_refs");
    reset << "5";  // the peak becomes what is resident now
    reset.close();
    works_ = reset.good();
    start_ = peak();
  }

  // Bytes above those at the start; none where the system does not say, and under a sanitizer,
  // which holds on to freed memory.
  std::optional<std::int64_t> grown() const {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return std::nullopt;
#endif
    return works_ && start_ > 0 ? std::optional(peak() - start_) : std::nullopt;
  }

 private:
  static std::int64_t peak() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
      if (word == "VmHWM:") {
        std::int64_t kib = 0;
        status >> kib;
        return kib * 1024;
      }
    }
    return 0;
  }

  bool works_ = false;
  std::int64_t start_ = 0;
};

}  // namespace bifocal::test
