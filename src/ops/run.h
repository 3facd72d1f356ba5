// run(stream, op): checks the op's arguments once, then calls the overload of the stream's backend.
#pragma once

#include "core/stream.h"

namespace bifocal {

template <class Op>
void run(Stream& stream, const Op& op) {
  op.check();
  std::visit([&](auto* backend) { run(*backend, op); }, stream.device);
}

}  // namespace bifocal
