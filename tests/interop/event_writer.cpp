// event_writer DIRECTORY FIRST LAST: an event file of steps FIRST to LAST, whose loss is 1 / step,
// for tests/python/event_file_test.py.
#include <exception>
#include <iostream>
#include <string>

#include "train/event_file.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: event_writer DIRECTORY FIRST LAST\n";
    return 2;
  }
  try {
    const std::int64_t first = std::stoll(argv[2]);
    const std::int64_t last = std::stoll(argv[3]);
    bifocal::EventFile events(argv[1], first);
    for (std::int64_t step = first; step <= last; ++step) {
      events.write(step, {{"loss", 1.0 / static_cast<double>(step)}, {"rate/all", 0.5}});
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
