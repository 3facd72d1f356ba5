// Error texts and closing of HDF5 handles.
#include "core/hdf5_handle.h"

namespace bifocal {

namespace {

herr_t append_reason(unsigned /*depth*/, const H5E_error2_t* error, void* text) {
  auto& reason = *static_cast<std::string*>(text);
  if (error->desc != nullptr && *error->desc != '\0') {
    reason += reason.empty() ? "" : "; ";
    reason += error->desc;
  }
  return 0;
}

std::recursive_mutex& library_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

}  // namespace

Hdf5Lock::Hdf5Lock() : lock_(library_mutex()) {}

void silence_hdf5() {
  // The library keeps one error stack, with its printing setting, per thread.
  thread_local const herr_t silenced = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  static_cast<void>(silenced);
}

std::string hdf5_reason() {
  std::string reason;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, append_reason, &reason);
  return reason.empty() ? "unknown" : reason;
}

Hdf5Handle::~Hdf5Handle() {
  if (id_ >= 0) {
    const Hdf5Lock lock;
    silence_hdf5();
    close_(id_);
  }
}

void Hdf5Handle::close() {
  if (id_ >= 0) {
    const hid_t id = std::exchange(id_, H5I_INVALID_HID);
    BIFOCAL_HDF5(close_(id));
  }
}

}  // namespace bifocal
