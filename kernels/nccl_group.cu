// Set-up, calls and end of non-blocking NCCL communicators.
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/cuda_check.h"
#include "kernels/nccl_group.h"

namespace bifocal {

namespace {

using Clock = std::chrono::steady_clock;

// BIFOCAL_NCCL_TIMEOUT, in seconds. A rank may wait for another that loads data or saves.
std::chrono::seconds operation_limit() {
  const char* text = std::getenv("BIFOCAL_NCCL_TIMEOUT");
  if (text == nullptr) {
    return std::chrono::seconds(600);
  }
  int seconds = 0;
  const char* end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, seconds);
  BIFOCAL_REQUIRE(parsed.ec == std::errc() && parsed.ptr == end && seconds > 0,
                  "[nccl] BIFOCAL_NCCL_TIMEOUT: wanted a positive number of seconds, got '{}'",
                  text);
  return std::chrono::seconds(seconds);
}

// The ranks of this host whose processes can be seen from here.
std::vector<NcclWatchdog::Peer> peers_here(Communicator& host) {
  const ProcessId self = this_process();
  const std::string name = host_name();
  const std::vector<std::string> all =
      gather_texts(host, fmt::format("{} {} {}", self.number, self.start, name));
  std::vector<NcclWatchdog::Peer> peers;
  for (int rank = 0; rank < host.size(); ++rank) {
    const std::string& text = all[static_cast<std::size_t>(rank)];
    char* rest = nullptr;
    NcclWatchdog::Peer peer{.rank = rank, .process = {}};
    peer.process.number = std::strtoll(text.c_str(), &rest, 10);
    peer.process.start = std::strtoull(rest, &rest, 10);
    if (rank != host.rank() && rest + 1 == name && is_running(peer.process)) {
      peers.push_back(peer);
    }
  }
  return peers;
}

// Where an error of one rank must become one of all.
template <class Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace

NcclContext::NcclContext(CudaStream& compute, Memory& memory, Communicator& host)
    : compute_(&compute), memory_(&memory) {
  int device = 0;
  std::chrono::seconds limit{};
  require_all(
      host, error_of([&] {
        limit = operation_limit();
        BIFOCAL_CUDA(cudaGetDevice(&device));
        int least = 0;
        int greatest = 0;
        BIFOCAL_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        BIFOCAL_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
        BIFOCAL_CUDA(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
      }));
  watchdog_.emplace(device,
                    fmt::format("rank {} of {} on {}", host.rank(), host.size(), host_name()),
                    peers_here(host),
                    limit);
}

NcclContext::~NcclContext() {
  watchdog_.reset();  // its operations give their events back
  cudaEventDestroy(ready_);
  cudaStreamDestroy(stream_);
}

std::shared_ptr<NcclOperation> NcclContext::begin(const char* name, std::size_t bytes, int ranks) {
  auto operation = std::make_shared<NcclOperation>(events_, name, bytes, ranks);
  BIFOCAL_CUDA(cudaEventRecord(ready_, compute_->handle()));
  BIFOCAL_CUDA(cudaStreamWaitEvent(stream_, ready_, 0));
  BIFOCAL_CUDA(cudaEventRecord(operation->started, stream_));
  watchdog_->watch(operation);
  return operation;
}

void NcclContext::queued(NcclOperation& operation) {
  BIFOCAL_CUDA(cudaEventRecord(operation.done, stream_));
  operation.state.store(NcclOperation::State::queued, std::memory_order_release);
}

void NcclContext::join(const NcclOperation& operation) {
  BIFOCAL_CUDA(cudaStreamWaitEvent(compute_->handle(), operation.done, 0));
}

NcclGroup::NcclGroup(std::shared_ptr<NcclContext> context, Communicator& host)
    : context_(std::move(context)), ranks_(host.size()) {
  ncclUniqueId id{};
  require_all(host, error_of([&] {
                const NcclLibrary& library = nccl();
                if (host.rank() == 0) {
                  check_nccl(library.get_unique_id(&id), "ncclGetUniqueId");
                }
              }));
  host.broadcast({&id, DType::u8, {static_cast<std::int64_t>(sizeof id)}}, 0);
  const auto operation = context_->begin("set-up of a communicator", 0, host.size());
  const std::string error = error_of([&] {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    complete(nccl().comm_init_rank_config(&comm_, host.size(), id, host.rank(), &config),
             "ncclCommInitRankConfig");
    context_->queued(*operation);
  });
  if (!error.empty()) {
    operation->state = NcclOperation::State::abandoned;
  }
  try {
    require_all(host, error);
  } catch (...) {
    if (comm_ != nullptr) {
      nccl().comm_abort(comm_);
    }
    throw;
  }
  context_->watchdog().add(*this);
}

NcclGroup::~NcclGroup() {
  context_->watchdog().remove(*this);
  if (failed_ || std::uncaught_exceptions() > 0) {
    nccl().comm_abort(comm_);
    return;
  }
  // The watchdog ends the process where a rank has died that this waits for.
  std::shared_ptr<NcclOperation> operation;
  try {
    operation = context_->begin("end of a communicator", 0, ranks_);
  } catch (const Error&) {  // a device that has failed: the end goes on unwatched
  }
  const ncclResult_t result = nccl().comm_finalize(comm_);
  if (result == ncclSuccess || (result == ncclInProgress && poll() == ncclSuccess)) {
    nccl().comm_destroy(comm_);
  } else {
    nccl().comm_abort(comm_);
  }
  if (operation) {
    operation->state = NcclOperation::State::abandoned;
  }
}

// Queuing takes microseconds once ranks are connected; the first operations connect them.
ncclResult_t NcclGroup::poll() {
  const Clock::time_point start = Clock::now();
  ncclResult_t result = ncclInProgress;
  while (result == ncclInProgress) {
    const ncclResult_t asked = nccl().comm_get_async_error(comm_, &result);
    if (asked != ncclSuccess) {
      return asked;
    }
    const Clock::duration waited = Clock::now() - start;
    if (waited > context_->watchdog().limit()) {
      return result;
    }
    if (waited < std::chrono::milliseconds(1)) {
      std::this_thread::yield();
    } else if (result == ncclInProgress) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  return result;
}

void NcclGroup::complete(ncclResult_t result, const char* what) {
  if (result == ncclInProgress) {
    result = poll();
  }
  if (result == ncclSuccess) {
    return;
  }
  failed_ = true;
  BIFOCAL_REQUIRE(result != ncclInProgress,
                  "[nccl] {} has not ended within {} s: another rank has stopped or is far behind; "
                  "see what it printed, or raise BIFOCAL_NCCL_TIMEOUT",
                  what,
                  context_->watchdog().limit().count());
  check_nccl(result, what, comm_);
}

void NcclGroup::check(const NcclOperation& operation) {
  const std::lock_guard lock(mutex_);
  ncclResult_t result = ncclSuccess;
  check_nccl(nccl().comm_get_async_error(comm_, &result), "ncclCommGetAsyncError", comm_);
  complete(result, operation.name);
}

std::string NcclGroup::asynchronous_error() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return {};
  }
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = nccl().comm_get_async_error(comm_, &result);
  if (asked != ncclSuccess) {
    result = asked;
  }
  if (result == ncclSuccess || result == ncclInProgress) {
    return {};
  }
  const char* last = nccl().get_last_error(comm_);
  return fmt::format("NCCL reports {}: {}",
                     nccl().get_error_string(result),
                     last == nullptr ? "nothing more" : last);
}

}  // namespace bifocal
