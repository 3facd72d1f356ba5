// Files that should be small.
#include "hf/strict_json.h"

#include "core/file.h"

namespace bifocal {

std::string read_small_file(const std::filesystem::path& path,
                            std::size_t most,
                            const std::string& where) {
  BIFOCAL_REQUIRE(std::filesystem::is_regular_file(path), "{}: it is not a regular file", where);
  const std::uintmax_t bytes = std::filesystem::file_size(path);
  BIFOCAL_REQUIRE(bytes <= most,
                  "{} has {} bytes, more than the {} that such a file may have",
                  where,
                  bytes,
                  most);
  return read_file(path);
}

}  // namespace bifocal
