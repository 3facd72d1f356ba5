// Device memory as a source of tensors.
#pragma once

#include <cstddef>
#include <memory>

#include <cuda_runtime.h>

#include "core/memory.h"

namespace bifocal {

// Blocks of `device`, 512-byte aligned, for use in the order of `stream`. Physical memory is put
// behind addresses that were reserved once, as it is needed, and stays until trim(); what is held
// is what other programs see taken, besides the context. limit_bytes: most that is held, as if the
// card had no more; 0 for no limit. The stream must outlive the source.
std::unique_ptr<MemorySource> make_device_source(cudaStream_t stream,
                                                 int device,
                                                 std::size_t limit_bytes);

}  // namespace bifocal
