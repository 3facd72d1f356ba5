// Errors: one exception type, the checks that throw it, and the checks of library calls.
#pragma once

#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

#include <fmt/format.h>

namespace bifocal {

// A failure that a person can act on. The text reads "[where] what was wanted, what came, what to
// do".
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

// Throws for a broken assumption of our own code: names the condition and its place.
[[noreturn]] void fail_assertion(const char* condition, std::source_location place);

// Throws for a failed library call: names the call, its place and what the library said.
[[noreturn]] void fail_call(const char* library,
                            const char* call,
                            std::string_view reason,
                            std::source_location place);

}  // namespace bifocal

// User, file, shape and machine errors: always checked.
#define BIFOCAL_REQUIRE(condition, ...)             \
  do {                                              \
    if (!(condition)) ::bifocal::fail(__VA_ARGS__); \
  } while (false)

// Our own mistakes: checked in every build, since no assertion stands in an inner loop.
#define BIFOCAL_ASSERT(condition)                                                             \
  do {                                                                                        \
    if (!(condition)) ::bifocal::fail_assertion(#condition, std::source_location::current()); \
  } while (false)
