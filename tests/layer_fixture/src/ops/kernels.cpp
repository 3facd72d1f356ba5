// Planted: nobody includes kernels.
#include "kernels/cuda_stream.h"
