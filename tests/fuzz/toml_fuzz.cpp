// A configuration file and a mixture file; what is accepted must survive being written and read
// again.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "config/read.h"
#include "core/error.h"
#include "data/mixture.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    static_cast<void>(bifocal::canonical_text(bifocal::parse_mixture(text, "fuzz", "dir")));
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
  }
  std::string written;
  try {
    written = bifocal::to_toml(bifocal::parse_run_config(text, "fuzz"));
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
    return 0;
  }
  if (bifocal::to_toml(bifocal::parse_run_config(written, "again")) != written) {
    std::abort();
  }
  return 0;
}
