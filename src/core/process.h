// What the system says about this process.
#pragma once

#include <cstddef>

namespace bifocal {

// Bytes of this process in physical memory (VmRSS); 0 where the system does not say.
std::size_t resident_bytes();

}  // namespace bifocal
