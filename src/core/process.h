// What the system says about processes of this machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace bifocal {

// Bytes of this process in physical memory (VmRSS); 0 where the system does not say.
std::size_t resident_bytes();

// A process of this machine. Numbers are used again; with its start time one names a single
// process.
struct ProcessId {
  std::int64_t number = 0;
  std::uint64_t start = 0;  // in ticks since boot
};

ProcessId this_process();

// Whether the process exists and has not ended; one that its parent has not collected has ended.
bool is_running(const ProcessId& process);

// Whether it is stopped (SIGSTOP, Ctrl-Z, a debugger).
bool is_stopped(const ProcessId& process);

std::string host_name();

}  // namespace bifocal
