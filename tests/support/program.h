// The program from outside.
#pragma once

#include <string>

namespace bifocal::test {

struct Outcome {
  int exit_code = -1;
  std::string text;  // stdout and stderr

  bool says(const std::string& part) const { return text.find(part) != std::string::npos; }
};

// Runs bifocal with these arguments, as a shell takes them.
Outcome run_program(const std::string& arguments);

}  // namespace bifocal::test
