// Errors of one rank that become errors of all.
#include "checkpoint/run_together.h"

#include <exception>
#include <string>

namespace bifocal {

void run_together(Communicator& group, const std::function<void()>& work) {
  std::string error;
  try {
    work();
  } catch (const std::exception& caught) {
    error = caught.what();
    if (error.empty()) {
      error = "unknown error";
    }
  }
  require_all(group, error);
}

}  // namespace bifocal
