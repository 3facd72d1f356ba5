// NCCL, loaded when it is first needed: a run on one GPU does without.
#pragma once

#include <source_location>

#include <nccl.h>

#include "core/error.h"

namespace bifocal {

// The functions of the library in use.
struct NcclLibrary {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
};

// Loads libnccl.so.2: from the loader's paths, else from where the build found it. Sets
// NCCL_NVLS_ENABLE=0 in the environment unless it is set: sums inside switches have no fixed order.
// Throws Error when there is no library or one older than 2.18.
const NcclLibrary& nccl();

// Throws what NCCL says of a call that failed; comm may be null.
void check_nccl(ncclResult_t result,
                const char* call,
                ncclComm_t comm = nullptr,
                std::source_location place = std::source_location::current());

}  // namespace bifocal
