// Owning handles over the HDF5 C library and the check of its calls.
#pragma once

#include <mutex>
#include <source_location>
#include <string>
#include <utility>

#include <hdf5.h>

#include "core/error.h"

namespace bifocal {

// Held during every call of the library, by the macro below and by whoever calls without it: one
// thread at a time, whether or not the library was built to lock itself. A thread may take it
// again.
class [[nodiscard]] Hdf5Lock {
 public:
  Hdf5Lock();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

// Stops the library from printing its error stack on the calling thread; failures are thrown.
void silence_hdf5();

// What the calling thread's HDF5 error stack says, innermost reason first. "unknown" if empty.
std::string hdf5_reason();

// The result of a call, or an Error with the library's reason where it is negative.
template <class Result>
Result check_hdf5(Result result, const char* call, std::source_location place) {
  if (result < 0) {
    fail_call("HDF5", call, hdf5_reason(), place);
  }
  return result;
}

// Owns one HDF5 identifier. The destructor closes and drops errors; writers call close(), since a
// file's last bytes may fail only there.
class Hdf5Handle {
 public:
  using Close = herr_t (*)(hid_t);

  Hdf5Handle() = default;

  Hdf5Handle(hid_t id, Close close) : id_(id), close_(close) {}

  ~Hdf5Handle();
  Hdf5Handle(const Hdf5Handle&) = delete;
  Hdf5Handle& operator=(const Hdf5Handle&) = delete;

  Hdf5Handle(Hdf5Handle&& other) noexcept
      : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}

  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }

  hid_t get() const { return id_; }

  // Closes now; throws Error where the library fails.
  void close();

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

}  // namespace bifocal

// The value of an HDF5 call, or an Error that names the call, its place and the library's reason.
#define BIFOCAL_HDF5(call)                                      \
  ([&](const std::source_location bifocal_place) {              \
    const ::bifocal::Hdf5Lock bifocal_lock;                     \
    ::bifocal::silence_hdf5();                                  \
    return ::bifocal::check_hdf5((call), #call, bifocal_place); \
  }(std::source_location::current()))
