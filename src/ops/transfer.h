// Copies between the host and the stream's device, and on the device. On the CPU they are one
// place. Elements move as they are: both sides have one type and shape, and do not overlap.
#pragma once

#include <cstdint>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/run.h"

namespace bifocal {

// y on the device = x on the host. x may change or go once run() returns.
struct Upload {
  TensorView y;
  ConstTensorView x;
  void check() const;
};

// y on the host = x on the device. run() returns when the elements are there: it waits for the work
// queued so far.
struct Download {
  TensorView y;
  ConstTensorView x;
  void check() const;
};

// y = x, both on the device.
struct Copy {
  TensorView y;
  ConstTensorView x;
  void check() const;
};

// Heads of every token: y[t, y_first + i] = x[t, x_first + i] for i < count.
struct CopyHeads {
  TensorView y;       // [tokens, heads of y, head_dim]
  ConstTensorView x;  // [tokens, heads of x, head_dim]
  std::int64_t y_first = 0;
  std::int64_t x_first = 0;
  std::int64_t count = 0;
  void check() const;
};

void run(CpuStream&, const Upload&);
void run(CpuStream&, const Download&);
void run(CpuStream&, const Copy&);
void run(CpuStream&, const CopyHeads&);
void run(CudaStream&, const Upload&);
void run(CudaStream&, const Download&);
void run(CudaStream&, const Copy&);
void run(CudaStream&, const CopyHeads&);

// Returns when all queued work is done. Throws Error when any of it failed.
void synchronize(CpuStream&);
void synchronize(CudaStream&);
void synchronize(Stream& stream);

}  // namespace bifocal
