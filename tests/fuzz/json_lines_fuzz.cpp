// Lines of JSON into documents.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "data/document.h"
#include "support/byte_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using bifocal::ChatTemplate;
  static const bifocal::test::ByteTokenizer tokenizer;
  static const bifocal::DocumentReader reader({.tokenizer = &tokenizer,
                                               .chat = ChatTemplate::named("llama3"),
                                               .end_token = "<|endoftext|>",
                                               .vocabulary = tokenizer.vocabulary()});
  try {
    const bifocal::Document document = reader.read({reinterpret_cast<const char*>(data), size});
    if (document.ids.size() != document.keep.size()) {
      std::abort();
    }
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
  }
  return 0;
}
