// Errors of one rank that become errors of all.
#pragma once

#include <functional>

#include "parallel/communicator.h"

namespace bifocal {

// Collective. Runs `work` on this rank; an error on any rank becomes the same Error on every rank.
void run_together(Communicator& group, const std::function<void()>& work);

}  // namespace bifocal
