// A library that writes down what a GPU ran, for kernel_trace.py. It is named in
// CUDA_INJECTION64_PATH, by which the driver loads it into any program, and BIFOCAL_TRACE names the
// file: to it are added a dot and the process id. One line for each kernel, copy and fill: first
// and last nanosecond, stream, name.
#include <cstdio>
#include <cstdlib>
#include <cupti.h>
#include <mutex>
#include <string>
#include <unistd.h>

namespace {

constexpr std::size_t kBufferBytes = std::size_t{8} << 20;

std::FILE* trace_file = nullptr;
std::mutex trace_mutex;

void stop_on(CUptiResult result, const char* what) {
  if (result != CUPTI_SUCCESS) {
    const char* text = nullptr;
    cuptiGetResultString(result, &text);
    std::fprintf(stderr, "[kernel_trace] %s: %s\n", what, text);
    std::exit(1);
  }
}

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(ACTIVITY_RECORD_ALIGNMENT, kBufferBytes));
  *bytes = *buffer == nullptr ? 0 : kBufferBytes;
  *most_records = 0;
}

template <class Record>
void write_record(const CUpti_Activity* activity, const char* name) {
  const auto* record = reinterpret_cast<const Record*>(activity);
  std::fprintf(trace_file,
               "%llu %llu %u %s\n",
               static_cast<unsigned long long>(record->start),
               static_cast<unsigned long long>(record->end),
               record->streamId,
               name);
}

void write_activity(const CUpti_Activity* activity) {
  switch (activity->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      write_record<CUpti_ActivityKernel10>(
          activity, reinterpret_cast<const CUpti_ActivityKernel10*>(activity)->name);
      return;
    case CUPTI_ACTIVITY_KIND_MEMCPY:
      write_record<CUpti_ActivityMemcpy6>(activity, "copy");
      return;
    case CUPTI_ACTIVITY_KIND_MEMSET:
      write_record<CUpti_ActivityMemset4>(activity, "fill");
      return;
    default:
      return;
  }
}

void CUPTIAPI take_buffer(CUcontext /*context*/,
                          std::uint32_t /*stream*/,
                          std::uint8_t* buffer,
                          std::size_t /*bytes*/,
                          std::size_t valid) {
  const std::lock_guard lock(trace_mutex);
  CUpti_Activity* activity = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
    write_activity(activity);
  }
  std::size_t dropped = 0;
  cuptiActivityGetNumDroppedRecords(nullptr, 0, &dropped);
  if (dropped > 0) {
    std::fprintf(stderr, "[kernel_trace] %zu records were dropped\n", dropped);
  }
  std::free(buffer);
}

void end_trace() {
  cuptiActivityFlushAll(1);
  const std::lock_guard lock(trace_mutex);
  std::fflush(trace_file);
}

}  // namespace

extern "C" int InitializeInjection() {
  const char* path = std::getenv("BIFOCAL_TRACE");
  if (path == nullptr) {
    std::fputs("[kernel_trace] BIFOCAL_TRACE must name a file\n", stderr);
    return 0;
  }
  const std::string name = std::string(path) + "." + std::to_string(::getpid());
  trace_file = std::fopen(name.c_str(), "w");
  if (trace_file == nullptr) {
    std::fprintf(stderr, "[kernel_trace] cannot write %s\n", name.c_str());
    return 0;
  }
  stop_on(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "callbacks");
  for (const CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                        CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMSET}) {
    stop_on(cuptiActivityEnable(kind), "activity");
  }
  std::atexit(end_trace);
  return 1;
}
