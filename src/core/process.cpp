// Linux's /proc.
#include "core/process.h"

#include <array>
#include <fstream>
#include <sstream>
#include <unistd.h>

#include <fmt/format.h>

namespace bifocal {

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total_pages = 0;
  std::size_t resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return statm ? resident_pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) : 0;
}

namespace {

struct ProcessStatus {
  char state = 0;  // 0: there is no such process
  std::uint64_t start = 0;
};

// proc(5): number (name) state and 18 numbers before the start time. The name may hold anything.
ProcessStatus status_of(std::int64_t number) {
  std::ifstream file(fmt::format("/proc/{}/stat", number));
  std::string line;
  std::getline(file, line);
  const std::size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) {
    return {};
  }
  std::istringstream fields(line.substr(name_end + 1));
  ProcessStatus status;
  std::string skipped;
  fields >> status.state;
  for (int field = 4; field < 22; ++field) {
    fields >> skipped;
  }
  fields >> status.start;
  return fields ? status : ProcessStatus{};
}

}  // namespace

ProcessId this_process() {
  const std::int64_t number = getpid();
  return {.number = number, .start = status_of(number).start};
}

bool is_running(const ProcessId& process) {
  const ProcessStatus status = status_of(process.number);
  return status.state != 0 && status.state != 'Z' && status.state != 'X' &&
         status.start == process.start;
}

bool is_stopped(const ProcessId& process) {
  const ProcessStatus status = status_of(process.number);
  return (status.state == 'T' || status.state == 't') && status.start == process.start;
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

}  // namespace bifocal
