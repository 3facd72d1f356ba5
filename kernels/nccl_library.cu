// The functions of libnccl, found by name.
#include <cstdlib>
#include <dlfcn.h>

#include "kernels/nccl_library.h"

namespace bifocal {

namespace {

void* open_library() {
  std::string reasons;
  for (const char* name : {"libnccl.so.2", BIFOCAL_NCCL_LIBRARY}) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL); handle != nullptr) {
      return handle;
    }
    const char* reason = dlerror();
    reasons += reason == nullptr ? "" : fmt::format("\n  {}", reason);
  }
  fail(
      "[nccl] several ranks on GPUs need NCCL 2, but it cannot be loaded: install libnccl2, or "
      "name its folder in LD_LIBRARY_PATH{}",
      reasons);
}

template <class Function>
void find(void* handle, const char* name, Function& function) {
  void* address = dlsym(handle, name);
  BIFOCAL_REQUIRE(
      address != nullptr, "[nccl] the library has no {}: install NCCL 2.18 or later", name);
  function = reinterpret_cast<Function>(address);
}

NcclLibrary load() {
  setenv("NCCL_NVLS_ENABLE", "0", 0);
  void* handle = open_library();
  NcclLibrary library;
  find(handle, "ncclGetVersion", library.get_version);
  int version = 0;
  constexpr int kLeastVersion = NCCL_VERSION(2, 18, 0);
  BIFOCAL_REQUIRE(library.get_version(&version) == ncclSuccess && version >= kLeastVersion,
                  "[nccl] wanted version {} (2.18) or later, got {}: install a newer libnccl2",
                  kLeastVersion,
                  version);
  find(handle, "ncclGetUniqueId", library.get_unique_id);
  find(handle, "ncclCommInitRankConfig", library.comm_init_rank_config);
  find(handle, "ncclCommGetAsyncError", library.comm_get_async_error);
  find(handle, "ncclCommFinalize", library.comm_finalize);
  find(handle, "ncclCommDestroy", library.comm_destroy);
  find(handle, "ncclCommAbort", library.comm_abort);
  find(handle, "ncclGetErrorString", library.get_error_string);
  find(handle, "ncclGetLastError", library.get_last_error);
  find(handle, "ncclGroupStart", library.group_start);
  find(handle, "ncclGroupEnd", library.group_end);
  find(handle, "ncclSend", library.send);
  find(handle, "ncclRecv", library.recv);
  find(handle, "ncclAllGather", library.all_gather);
  find(handle, "ncclReduceScatter", library.reduce_scatter);
  find(handle, "ncclAllReduce", library.all_reduce);
  find(handle, "ncclBroadcast", library.broadcast);
  return library;
}

}  // namespace

const NcclLibrary& nccl() {
  static const NcclLibrary library = load();
  return library;
}

void check_nccl(ncclResult_t result,
                const char* call,
                ncclComm_t comm,
                std::source_location place) {
  if (result == ncclSuccess) {
    return;
  }
  const char* last = nccl().get_last_error(comm);
  const std::string reason =
      fmt::format("{}: {}", nccl().get_error_string(result), last == nullptr ? "" : last);
  fail_call("NCCL", call, reason, place);
}

}  // namespace bifocal
