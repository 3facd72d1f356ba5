// The program from outside.
#include "support/program.h"

#include <array>
#include <cstdio>
#include <sys/wait.h>

#include <gtest/gtest.h>

namespace bifocal::test {

Outcome run_program(const std::string& arguments) {
  const std::string line = std::string("\"") + BIFOCAL_BINARY + "\" " + arguments + " 2>&1";
  std::FILE* pipe = popen(line.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  Outcome outcome;
  std::array<char, 4096> buffer{};
  for (std::size_t count = 1; count > 0;) {
    count = std::fread(buffer.data(), 1, buffer.size(), pipe);
    outcome.text.append(buffer.data(), count);
  }
  const int status = pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

}  // namespace bifocal::test
