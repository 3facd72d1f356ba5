// Signals that ask a run to save and end: SIGTERM, SIGINT and SIGUSR1.
#pragma once

#include <array>
#include <csignal>
#include <string_view>

#include "parallel/communicator.h"

namespace bifocal {

// Between construction and destruction those signals are remembered instead of ending the process;
// then what they did before holds again. A second one changes nothing, since launchers deliver some
// twice; SIGQUIT ends a process at once. One object at a time.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal that any rank of the group has received, the same answer on all of them; 0: none.
  // Collective: one sum of a few bytes.
  int agreed(Communicator& group) const;

 private:
  static constexpr std::array<int, 3> kSignals{SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, kSignals.size()> before_{};
};

// "SIGTERM"; of the signals above.
std::string_view name_of_signal(int signal);

}  // namespace bifocal
