// Version of the program (defined by the build), of the compiler and of the libraries in use.
#include "cli/version.h"

#include <array>
#include <pcre2.h>
#include <utf8proc.h>
#include <variant>
#include <zlib.h>
#include <zstd.h>

#include <CLI/Version.hpp>
#include <cblas.h>
#include <fmt/format.h>
#include <hdf5.h>
#include <nlohmann/json.hpp>
#include <openssl/crypto.h>

#include "core/stream.h"
#include "core/toml.h"
#include "parallel/mpi_communicator.h"

namespace bifocal {

namespace {

std::string pcre2_version() {
  std::array<char, 64> text{};
  pcre2_config(PCRE2_CONFIG_VERSION, text.data());
  return text.data();
}

}  // namespace

std::string commit_text() {
  return BIFOCAL_COMMIT;
}

std::string version_text() {
  constexpr bool kHasCuda = std::variant_size_v < decltype(Stream::device) >> 1;
  unsigned hdf5_major = 0;
  unsigned hdf5_minor = 0;
  unsigned hdf5_release = 0;
  H5get_libversion(&hdf5_major, &hdf5_minor, &hdf5_release);
  std::string text = fmt::format("bifocal {}\n", BIFOCAL_COMMIT);
  text += fmt::format(
      "build: {}, march {}, CUDA {}\n", BIFOCAL_BUILD_TYPE, BIFOCAL_MARCH, kHasCuda ? "on" : "off");
  text += fmt::format("compiler: {}\n", __VERSION__);
  text += fmt::format("MPI: {}\n", mpi_library_version());
  text += fmt::format("HDF5: {}.{}.{}\n", hdf5_major, hdf5_minor, hdf5_release);
  text += fmt::format("BLAS: {}\n", openblas_get_config());
  text += fmt::format("OpenSSL: {}\n", OpenSSL_version(OPENSSL_VERSION));
  text += fmt::format("PCRE2: {}\n", pcre2_version());
  text += fmt::format("utf8proc: {}\n", utf8proc_version());
  text += fmt::format("zlib: {}\n", zlibVersion());
  text += fmt::format("zstd: {}\n", ZSTD_versionString());
  text += fmt::format(
      "fmt: {}.{}.{}\n", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
  text += fmt::format("nlohmann-json: {}.{}.{}\n",
                      NLOHMANN_JSON_VERSION_MAJOR,
                      NLOHMANN_JSON_VERSION_MINOR,
                      NLOHMANN_JSON_VERSION_PATCH);
  text += fmt::format("CLI11: {}\n", CLI11_VERSION);
  text += fmt::format("toml++: {}.{}.{}", TOML_LIB_MAJOR, TOML_LIB_MINOR, TOML_LIB_PATCH);
  return text;
}

}  // namespace bifocal
