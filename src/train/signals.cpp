// One flag for each signal. Ranks receive signals at different moments, some none at all: only what
// they sum up together is acted on.
#include "train/signals.h"

#include <algorithm>
#include <cstdint>

#include "core/error.h"

namespace bifocal {

namespace {

// The only kind of object that a handler may write, besides lock-free atomics.
volatile std::sig_atomic_t received_term = 0;
volatile std::sig_atomic_t received_int = 0;
volatile std::sig_atomic_t received_usr1 = 0;
bool is_watching = false;

void remember(int signal) {
  if (signal == SIGTERM) {
    received_term = 1;
  } else if (signal == SIGINT) {
    received_int = 1;
  } else {
    received_usr1 = 1;
  }
}

}  // namespace

StopSignals::StopSignals() {
  BIFOCAL_ASSERT(!is_watching);
  is_watching = true;
  received_term = 0;
  received_int = 0;
  received_usr1 = 0;

  struct sigaction action {};

  action.sa_handler = remember;
  action.sa_flags = SA_RESTART;  // calls in progress go on
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals.at(i), &action, &before_.at(i));
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals.at(i), &before_.at(i), nullptr);
  }
  is_watching = false;
}

int StopSignals::agreed(Communicator& group) const {
  std::array<std::int64_t, kSignals.size()> counts{received_term, received_int, received_usr1};
  group.all_reduce_sum({counts.data(), DType::i64, {static_cast<std::int64_t>(counts.size())}});
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    if (counts.at(i) > 0) {
      return kSignals.at(i);
    }
  }
  return 0;
}

std::string_view name_of_signal(int signal) {
  switch (signal) {
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    default:
      return "SIGUSR1";
  }
}

}  // namespace bifocal
