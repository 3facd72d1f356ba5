// The program from outside.
#pragma once

#include <array>
#include <cstdio>
#include <string>
#include <sys/wait.h>

#include <gtest/gtest.h>

namespace bifocal::test {

struct Outcome {
  int exit_code = -1;
  std::string text;  // stdout and stderr

  bool says(const std::string& part) const { return text.find(part) != std::string::npos; }
};

// Runs `command` in a shell.
inline Outcome run_command(const std::string& command) {
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
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
