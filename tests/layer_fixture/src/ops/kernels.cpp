// Planted: nobody includes kernels.
#include "kernels/cuda_ops.h"
