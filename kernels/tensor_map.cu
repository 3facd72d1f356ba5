// Tensor maps through the driver's own function, found at run time: nothing links to the driver.
#include <array>

#include <cudaTypedefs.h>

#include "kernels/cuda_check.h"
#include "kernels/tensor_map.h"

namespace bifocal {
namespace {

constexpr const char* kWhere = "tensor_map";
constexpr std::size_t kMostDimensions = 5;

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  auto status = cudaDriverEntryPointSymbolNotFound;
  BIFOCAL_CUDA(cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kVersion, cudaEnableDefault, &status));
  BIFOCAL_REQUIRE(status == cudaDriverEntryPointSuccess && function != nullptr,
                  "[{}] wanted a driver with cuTensorMapEncodeTiled, got none: update the driver "
                  "to CUDA 12 or later, or set run.kernels to portable",
                  kWhere);
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const BFloat16* tensor,
                            std::initializer_list<MapDimension> dimensions) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  std::array<cuuint64_t, kMostDimensions> sizes{};
  std::array<cuuint64_t, kMostDimensions> strides{};  // in bytes, from the second dimension on
  std::array<cuuint32_t, kMostDimensions> boxes{};
  std::array<cuuint32_t, kMostDimensions> steps{};
  BIFOCAL_REQUIRE(dimensions.size() >= 2 && dimensions.size() <= kMostDimensions,
                  "[{}] wanted 2 to 5 dimensions, got {}: reshape the tensor",
                  kWhere,
                  dimensions.size());
  std::size_t rank = 0;
  for (const MapDimension& dimension : dimensions) {
    sizes.at(rank) = static_cast<cuuint64_t>(dimension.size);
    boxes.at(rank) = static_cast<cuuint32_t>(dimension.box);
    steps.at(rank) = 1;
    if (rank > 0) {
      strides.at(rank - 1) = static_cast<cuuint64_t>(dimension.stride) * sizeof(BFloat16);
    }
    ++rank;
  }
  CUtensorMap map{};
  const CUresult result = encode(&map,
                                 CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                 static_cast<cuuint32_t>(rank),
                                 const_cast<BFloat16*>(tensor),
                                 sizes.data(),
                                 strides.data(),
                                 boxes.data(),
                                 steps.data(),
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  BIFOCAL_REQUIRE(result == CUDA_SUCCESS,
                  "[{}] wanted a tensor that the copy engine can describe, got error {} for rank "
                  "{}, sizes {} {} {}, boxes {} {} {}: set run.kernels to portable",
                  kWhere,
                  static_cast<int>(result),
                  rank,
                  sizes[0],
                  sizes[1],
                  sizes[2],
                  boxes[0],
                  boxes[1],
                  boxes[2]);
  return map;
}

bool is_hopper() {
  int device = 0;
  int major = 0;
  int minor = 0;
  BIFOCAL_CUDA(cudaGetDevice(&device));
  BIFOCAL_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  BIFOCAL_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

}  // namespace bifocal
