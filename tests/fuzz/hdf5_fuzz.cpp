// Token shards, and the manifest that a checkpoint's files are checked against before they are
// opened. Bytes that begin like HDF5 are a shard, others a manifest without its checksum, which is
// put behind.
#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest.h"
#include "core/error.h"
#include "core/sha256.h"
#include "data/token_file.h"
#include "fuzz/input_file.h"

namespace {

void read_shard(const std::string& path) {
  constexpr std::int64_t kMostTokens = 1 << 16;
  const bifocal::TokenFile file(path);
  const std::int64_t documents = std::min(file.documents(), kMostTokens);
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(documents) + 1);
  file.read_offsets(0, offsets);
  const auto tokens = static_cast<std::size_t>(std::min(file.tokens(), kMostTokens));
  std::vector<std::int32_t> ids(tokens);
  std::vector<std::uint8_t> keep(tokens);
  file.read_ids(0, ids);
  file.read_keep(0, keep);
}

void read_manifest_of(std::string_view body) {
  std::string text(body);
  const std::string checksum = bifocal::sha256_hex(text + "\n}\n");
  text += ",\n \"checksum\": \"" + checksum;
  text += "\"\n}\n";
  const bifocal::Manifest manifest = bifocal::parse_manifest(text, "fuzz");
  static_cast<void>(bifocal::to_text(manifest));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bifocal::test::InputFile file;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    if (bytes.starts_with("\x89HDF")) {
      read_shard(file.with({data, size}));
    } else {
      read_manifest_of(bytes);
    }
  } catch (const bifocal::Error&) {  // a refusal is what most inputs deserve
  }
  return 0;
}
