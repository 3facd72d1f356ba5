// A safetensors file: its header, and every element of every tensor.
#include <cstdint>
#include <string>

#include "core/error.h"
#include "core/memory.h"
#include "fuzz/input_file.h"
#include "hf/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bifocal::test::InputFile file;
  try {
    const bifocal::SafetensorsReader reader(file.with({data, size}));
    bifocal::Memory memory;
    for (const auto& [name, entry] : reader.entries()) {
      const bifocal::Tensor copy =
          memory.empty(bifocal::Region::weights, entry.dtype, bifocal::Shape{entry.shape.size()});
      reader.read(name, 0, copy);
    }
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
  }
  return 0;
}
