// Copies between host and device, and on one device. On the CPU all of them are the same copy.
#pragma once

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// y = x. x may change as soon as run() returns.
struct Upload {
  TensorView y;       // on the stream's device
  ConstTensorView x;  // on the host; type and shape of y
  void check() const;
};

// y = x. Returns when the values are there, after all that was queued before.
struct Download {
  TensorView y;       // on the host
  ConstTensorView x;  // on the stream's device; type and shape of y
  void check() const;
};

// y = x, both on the stream's device. They must not overlap.
struct Copy {
  TensorView y;
  ConstTensorView x;  // type and shape of y
  void check() const;
};

void run(CpuStream&, const Upload&);
void run(CpuStream&, const Download&);
void run(CpuStream&, const Copy&);
void run(CudaStream&, const Upload&);
void run(CudaStream&, const Download&);
void run(CudaStream&, const Copy&);

// Returns when everything queued on the stream is done.
void synchronize(Stream& stream);
void synchronize(CpuStream&);
void synchronize(CudaStream&);

}  // namespace bifocal
