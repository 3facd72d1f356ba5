// Linux's /proc.
#include "core/process.h"

#include <fstream>
#include <unistd.h>

namespace bifocal {

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total_pages = 0;
  std::size_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return statm ? resident_pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) : 0;
}

}  // namespace bifocal
