// run(stream, op): checks the op's arguments once, then calls the overload of the stream's backend.
//
// On CUDA the tensors lie on the stream's device, are float32 or bfloat16 and of one type in an op
// except where its header says otherwise; arithmetic is float32, rounded once at each store. Other
// types throw Error. Ops are queued: nothing waits for the device except where said.
#pragma once

#include "core/stream.h"

namespace bifocal {

template <class Op>
void run(Stream& stream, const Op& op) {
  op.check();
  std::visit([&](auto* backend) { run(*backend, op); }, stream.device);
}

}  // namespace bifocal
