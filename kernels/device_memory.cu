// Physical memory mapped into reserved addresses (CUDA's virtual memory management), in two arenas:
// small blocks between large ones would cut the room that a large block leaves.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <cuda.h>

#include "core/arena.h"
#include "kernels/cuda_check.h"
#include "kernels/device_memory.h"

namespace bifocal {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGranule = 512;
constexpr std::size_t kSmallBlock = kMiB;  // blocks below come from the arena of small pages
constexpr std::size_t kSmallPage = 2 * kMiB;
constexpr std::size_t kLargePage = 32 * kMiB;
// Addresses for each byte of the card, so that a large block finds room beside those that stay.
constexpr std::size_t kAddresses = 4;

// The driver's calls, found through the runtime: the program needs no libcuda to start.
struct Driver {
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) release;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) destroy;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) allow;
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuGetErrorString) describe;

  Driver() {
    find("cuMemAddressReserve", reserve);
    find("cuMemAddressFree", release);
    find("cuMemCreate", create);
    find("cuMemRelease", destroy);
    find("cuMemMap", map);
    find("cuMemUnmap", unmap);
    find("cuMemSetAccess", allow);
    find("cuMemGetAllocationGranularity", granularity);
    find("cuGetErrorString", describe);
  }

  void check(CUresult status, const char* call) const {
    if (status == CUDA_SUCCESS) {
      return;
    }
    const char* text = nullptr;
    describe(status, &text);
    fail("[cuda] {} failed: {}", call, text != nullptr ? text : "unknown error");
  }

 private:
  template <class Function>
  static void find(const char* name, Function& function) {
    constexpr unsigned kVersion = 12000;  // the interface that cuda.h declares since then
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    BIFOCAL_CUDA(
        cudaGetDriverEntryPointByVersion(name, &entry, kVersion, cudaEnableDefault, &found));
    BIFOCAL_REQUIRE(found == cudaDriverEntryPointSuccess && entry != nullptr,
                    "[cuda] the driver has no {}: install one of version 525 or later",
                    name);
    function = reinterpret_cast<Function>(entry);
  }
};

// Bytes of physical memory, over all arenas of a source.
struct Budget {
  std::size_t limit = 0;  // 0: none
  std::size_t held = 0;
  std::size_t peak = 0;
};

// One reserved range of addresses and the pages behind it.
class DevicePages final : public PageSource {
 public:
  DevicePages(const Driver& driver,
              cudaStream_t stream,
              int device,
              std::size_t page_bytes,
              std::size_t page_count,
              Budget& budget)
      : driver_(driver),
        stream_(stream),
        page_bytes_(page_bytes),
        budget_(budget),
        handles_(page_count, 0) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    std::size_t granularity = 0;
    driver_.check(driver_.granularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                  "cuMemGetAllocationGranularity");
    BIFOCAL_REQUIRE(page_bytes % granularity == 0,
                    "[cuda] wanted a device that maps memory in pages of {} bytes, got {}",
                    page_bytes,
                    granularity);
    driver_.check(driver_.reserve(&base_, page_bytes * page_count, kLargePage, 0, 0),
                  "cuMemAddressReserve");
  }

  ~DevicePages() override {
    for (std::size_t page = 0; page < handles_.size(); ++page) {
      if (handles_[page] != 0) {
        unmap(page);
      }
    }
    driver_.release(base_, page_bytes_ * handles_.size());
  }

  DevicePages(const DevicePages&) = delete;
  DevicePages& operator=(const DevicePages&) = delete;
  DevicePages(DevicePages&&) = delete;
  DevicePages& operator=(DevicePages&&) = delete;

  bool map(std::size_t page) override {
    if (budget_.limit != 0 && budget_.held + page_bytes_ > budget_.limit) {
      return false;
    }
    CUmemGenericAllocationHandle handle = 0;
    const CUresult created = driver_.create(&handle, page_bytes_, &properties_, 0);
    if (created == CUDA_ERROR_OUT_OF_MEMORY) {
      return false;
    }
    driver_.check(created, "cuMemCreate");
    const CUdeviceptr at = address(page);
    const CUresult mapped = driver_.map(at, page_bytes_, 0, handle, 0);
    if (mapped != CUDA_SUCCESS) {
      driver_.destroy(handle);
      driver_.check(mapped, "cuMemMap");
    }
    CUmemAccessDesc access{};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult allowed = driver_.allow(at, page_bytes_, &access, 1);
    if (allowed != CUDA_SUCCESS) {
      driver_.unmap(at, page_bytes_);
      driver_.destroy(handle);
      driver_.check(allowed, "cuMemSetAccess");
    }
    handles_[page] = handle;
    budget_.held += page_bytes_;
    budget_.peak = std::max(budget_.peak, budget_.held);
    return true;
  }

  void unmap(std::size_t page) noexcept override {
    driver_.unmap(address(page), page_bytes_);
    driver_.destroy(handles_[page]);
    handles_[page] = 0;
    budget_.held -= page_bytes_;
  }

  void settle() override {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    BIFOCAL_CUDA(cudaStreamIsCapturing(stream_, &capture));
    BIFOCAL_REQUIRE(capture == cudaStreamCaptureStatusNone,
                    "[memory] wanted to move free device memory, which waits for the stream, but "
                    "the stream is being recorded: run the same work once before recording it, or "
                    "leave more memory free");
    BIFOCAL_CUDA(cudaStreamSynchronize(stream_));
  }

  std::byte* base() const { return reinterpret_cast<std::byte*>(base_); }

 private:
  CUdeviceptr address(std::size_t page) const { return base_ + page * page_bytes_; }

  const Driver& driver_;
  cudaStream_t stream_;
  std::size_t page_bytes_;
  Budget& budget_;
  CUmemAllocationProp properties_{};
  CUdeviceptr base_ = 0;
  std::vector<CUmemGenericAllocationHandle> handles_;  // 0: not mapped
};

std::size_t total_bytes() {
  std::size_t available = 0;
  std::size_t total = 0;
  BIFOCAL_CUDA(cudaMemGetInfo(&available, &total));
  return total;
}

class DeviceSource final : public MemorySource {
 public:
  DeviceSource(cudaStream_t stream, int device, std::size_t limit_bytes)
      : stream_(stream),
        budget_{.limit = limit_bytes},
        total_(total_bytes()),
        small_(driver_, stream, device, kSmallPage, total_, budget_),
        large_(driver_, stream, device, kLargePage, kAddresses * total_, budget_) {}

  bool on_host() const override { return false; }

  std::size_t granule() const override { return kGranule; }

  void* take(std::size_t bytes) override {
    if (void* block = holder(bytes).take(bytes)) {
      return block;
    }
    other(bytes).arena.trim();  // its unused pages may be what is missing here
    return holder(bytes).take(bytes);
  }

  void give(void* block, std::size_t bytes) noexcept override {
    Pool& pool = holder(bytes);
    pool.arena.give(static_cast<std::size_t>(static_cast<std::byte*>(block) - pool.pages.base()),
                    bytes);
  }

  void clear(void* block, std::size_t bytes) override {
    if (bytes > 0) {
      BIFOCAL_CUDA(cudaMemsetAsync(block, 0, bytes, stream_));
    }
  }

  void trim() override {
    small_.arena.trim();
    large_.arena.trim();
  }

  std::size_t held_bytes() const override { return budget_.held; }

  std::size_t peak_held_bytes() const override { return budget_.peak; }

  std::string shortage() const override {
    const std::string held = format_bytes(static_cast<double>(budget_.held));
    if (budget_.limit != 0) {
      return fmt::format("memory.limit_gib allows {} of device memory and {} are taken",
                         format_bytes(static_cast<double>(budget_.limit)),
                         held);
    }
    return fmt::format("the GPU has {}, of which {} are taken here",
                       format_bytes(static_cast<double>(total_)),
                       held);
  }

 private:
  // Addresses, their pages, and what lies where.
  struct Pool {
    Pool(const Driver& driver,
         cudaStream_t stream,
         int device,
         std::size_t page_bytes,
         std::size_t addresses,
         Budget& budget)
        : pages(driver, stream, device, page_bytes, addresses / page_bytes, budget),
          arena(pages, page_bytes, addresses / page_bytes) {}

    void* take(std::size_t bytes) {
      const std::optional<std::size_t> offset = arena.take(bytes);
      return offset ? pages.base() + *offset : nullptr;
    }

    DevicePages pages;
    Arena arena;
  };

  Pool& holder(std::size_t bytes) { return bytes < kSmallBlock ? small_ : large_; }

  Pool& other(std::size_t bytes) { return bytes < kSmallBlock ? large_ : small_; }

  Driver driver_;
  cudaStream_t stream_;
  Budget budget_;
  std::size_t total_;
  Pool small_;
  Pool large_;
};

}  // namespace

std::unique_ptr<MemorySource> make_device_source(cudaStream_t stream,
                                                 int device,
                                                 std::size_t limit_bytes) {
  return std::make_unique<DeviceSource>(stream, device, limit_bytes);
}

}  // namespace bifocal
