// Which of several kernels for one op runs.
#pragma once

namespace bifocal {

enum class KernelChoice {
  automatic,  // the fastest that fits the device and the tensors
  portable,   // those for every device: compute capability 8.x and 9.0
};

// Of the whole process, from the next op on; automatic at the start.
void set_kernel_choice(KernelChoice choice);

// The current device is a Hopper and its kernels are not forbidden.
bool use_hopper_kernels();

}  // namespace bifocal
