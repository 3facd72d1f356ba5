// A tokenizer.json, and a short text through the tokenizer that comes of it.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/tokenizer.h"
#include "fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bifocal::test::InputFile file;
  static const std::string text = "Hello  w\xc3\xb6rld, it's 12345 \xf0\x9f\x98\x80\n\n<|im_end|>";
  try {
    const std::unique_ptr<bifocal::Tokenizer> tokenizer =
        bifocal::read_tokenizer(file.with({data, size}));
    const bifocal::Encoding encoding = tokenizer->encode_with_ends(text);
    if (encoding.ids.size() != encoding.ends.size()) {
      std::abort();
    }
    for (const std::int32_t id : encoding.ids) {
      if (id < 0 || id >= tokenizer->vocabulary()) {
        std::abort();
      }
    }
    static_cast<void>(tokenizer->decode(encoding.ids, true));
    static_cast<void>(tokenizer->prefix());
    static_cast<void>(tokenizer->hash());
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
  }
  return 0;
}
