// Texts of failures.
#include "core/error.h"

namespace bifocal {

void fail_assertion(const char* condition, std::source_location place) {
  throw Error(
      fmt::format("[{}:{}] internal check failed: {}. This is a bug in bifocal: please report it",
                  place.file_name(),
                  place.line(),
                  condition));
}

void fail_call(const char* library,
               const char* call,
               std::string_view reason,
               std::source_location place) {
  throw Error(fmt::format(
      "[{}] {} failed: {} ({}:{})", library, call, reason, place.file_name(), place.line()));
}

}  // namespace bifocal
