// The text of the error that a call throws.
#pragma once

#include <string>

#include "core/error.h"

namespace bifocal::test {

// Empty where the call throws none; other exceptions pass.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace bifocal::test
