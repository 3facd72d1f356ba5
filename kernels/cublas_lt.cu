// Plans of matrix products: descriptors and the algorithm that the library's heuristic puts first.
#include <algorithm>
#include <cstdint>
#include <source_location>

#include "kernels/cublas_lt.h"
#include "kernels/cuda_check.h"

namespace bifocal {
namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what the library takes on Hopper
constexpr unsigned kMostAlignment = 256;

void check_cublas(cublasStatus_t status, const char* call, std::source_location place) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail_call("cuBLASLt", call, cublasLtGetStatusString(status), place);
  }
}

#define BIFOCAL_CUBLAS(call) check_cublas((call), #call, std::source_location::current())

cudaDataType_t library_type(DType type) {
  return type == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

// The largest power of two that divides a pointer, to kMostAlignment.
unsigned alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | kMostAlignment;
  return static_cast<unsigned>(address & (~address + 1));
}

template <class T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  BIFOCAL_CUBLAS(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)));
}

template <class T>
void set(cublasLtMatmulPreference_t preference,
         cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  BIFOCAL_CUBLAS(
      cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

struct Layout {
  cublasLtMatrixLayout_t handle = nullptr;

  Layout(DType type, std::int64_t rows, std::int64_t columns) {
    BIFOCAL_CUBLAS(cublasLtMatrixLayoutCreate(&handle,
                                              library_type(type),
                                              static_cast<std::uint64_t>(rows),
                                              static_cast<std::uint64_t>(columns),
                                              rows));
  }

  ~Layout() { cublasLtMatrixLayoutDestroy(handle); }

  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
};

// CUBLAS_COMPUTE_32F on float32 operands never rounds them to TF32.
struct Description {
  cublasLtMatmulDesc_t handle = nullptr;

  explicit Description(const MatrixProduct& p) {
    BIFOCAL_CUBLAS(cublasLtMatmulDescCreate(&handle, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(handle, CUBLASLT_MATMUL_DESC_TRANSA, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(handle, CUBLASLT_MATMUL_DESC_TRANSB, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p.bias != nullptr) {
      set(handle, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(handle, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, library_type(p.output));
      set_bias(p.bias);
    }
  }

  ~Description() { cublasLtMatmulDescDestroy(handle); }

  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  void set_bias(const void* bias) const { set(handle, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias); }
};

// Parts of a sum go through the workspace and are added in their order: no reduction in place,
// whose order of blocks may vary, and none in a 16-bit output type.
struct Preference {
  cublasLtMatmulPreference_t handle = nullptr;

  explicit Preference(const MatrixProduct& p) {
    BIFOCAL_CUBLAS(cublasLtMatmulPreferenceCreate(&handle));
    const std::uint32_t reductions =
        CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    set(handle, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{kWorkspaceBytes});
    set(handle, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    set(handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.a));
    set(handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.b));
    set(handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.d));
    set(handle, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d));
  }

  ~Preference() { cublasLtMatmulPreferenceDestroy(handle); }

  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
};

}  // namespace

struct CublasLt::Plan {
  Description description;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algorithm{};
  bool exists = false;

  explicit Plan(const MatrixProduct& p)
      : description(p),
        a(p.input, p.a_transposed ? p.k : p.m, p.a_transposed ? p.m : p.k),
        b(p.input, p.b_transposed ? p.n : p.k, p.b_transposed ? p.k : p.n),
        d(p.output, p.m, p.n) {}
};

CublasLt::CublasLt() {
  BIFOCAL_CUBLAS(cublasLtCreate(&handle_));
  const cudaError_t status = cudaMalloc(&workspace_, kWorkspaceBytes);
  if (status != cudaSuccess) {
    cublasLtDestroy(handle_);
    BIFOCAL_CUDA(status);
  }
}

CublasLt::~CublasLt() {
  cudaFree(workspace_);
  cublasLtDestroy(handle_);
}

CublasLt::Key CublasLt::key_of(const MatrixProduct& p) {
  const int kind = (p.a_transposed ? 1 : 0) | (p.b_transposed ? 2 : 0) | (p.adds ? 4 : 0) |
                   (p.bias != nullptr ? 8 : 0) | (p.input == DType::bf16 ? 16 : 0) |
                   (p.output == DType::bf16 ? 32 : 0);
  const unsigned inputs = alignment_of(p.a) << 16 | alignment_of(p.b);
  return {p.m, p.n, p.k, kind, inputs, alignment_of(p.d)};
}

std::unique_ptr<CublasLt::Plan> CublasLt::make_plan(const MatrixProduct& product) const {
  auto plan = std::make_unique<Plan>(product);
  const Preference preference(product);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_,
                                                               plan->description.handle,
                                                               plan->a.handle,
                                                               plan->b.handle,
                                                               plan->d.handle,
                                                               plan->d.handle,
                                                               preference.handle,
                                                               1,
                                                               &result,
                                                               &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) {
    BIFOCAL_CUBLAS(status);
    plan->exists = found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
    plan->algorithm = result.algo;
  }
  return plan;
}

bool CublasLt::multiply(cudaStream_t stream, const MatrixProduct& product) {
  std::unique_ptr<Plan>& plan = plans_[key_of(product)];
  if (plan == nullptr) {
    plan = make_plan(product);
  }
  if (!plan->exists) {
    BIFOCAL_REQUIRE(product.bias != nullptr,
                    "[cublas] wanted a product of {} x {} x {} of {}, got no algorithm from "
                    "cuBLASLt: change the sizes or the type",
                    product.m,
                    product.n,
                    product.k,
                    name_of(product.input));
    return false;
  }
  if (product.bias != nullptr) {
    plan->description.set_bias(product.bias);
  }
  const float alpha = 1.0F;
  const float beta = product.adds ? 1.0F : 0.0F;
  BIFOCAL_CUBLAS(cublasLtMatmul(handle_,
                                plan->description.handle,
                                &alpha,
                                product.a,
                                plan->a.handle,
                                product.b,
                                plan->b.handle,
                                &beta,
                                product.d,
                                plan->d.handle,
                                product.d,
                                plan->d.handle,
                                &plan->algorithm,
                                workspace_,
                                kWorkspaceBytes,
                                stream));
  return true;
}

}  // namespace bifocal
