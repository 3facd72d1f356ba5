// Files of lines, plain or compressed: found out, unpacked and cut.
#include <cstdint>
#include <string>

#include "core/error.h"
#include "data/text_source.h"
#include "fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  constexpr std::size_t kMostLine = std::size_t{1} << 20;
  static const bifocal::test::InputFile file;
  try {
    bifocal::LineReader reader(file.with({data, size}), kMostLine);
    for (std::string line; reader.next(line);) {
    }
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
  }
  return 0;
}
