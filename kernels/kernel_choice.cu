// The process's choice of kernels.
#include <atomic>

#include "kernels/kernel_choice.h"
#include "kernels/tensor_map.h"

namespace bifocal {
namespace {

std::atomic<KernelChoice>& current_choice() {
  static std::atomic<KernelChoice> choice = KernelChoice::automatic;
  return choice;
}

}  // namespace

void set_kernel_choice(KernelChoice choice) {
  current_choice() = choice;
}

bool use_hopper_kernels() {
  return current_choice() == KernelChoice::automatic && is_hopper();
}

}  // namespace bifocal
