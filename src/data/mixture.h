// The sources that rows are made of, and the file that names them.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace bifocal {

struct MixtureSource {
  std::string name;
  std::vector<std::string> paths;  // token shards, or directories that hold them
  double weight = 1.0;             // share of the tokens, relative to the other sources'
};

struct Mixture {
  std::vector<MixtureSource> sources;
};

// A TOML file with one table [[source]] per source: name, paths (a text or a list of texts,
// relative to the file's directory) and weight (a number of at least 0; 0 draws nothing from the
// source, which must be there all the same). Throws Error with file and line for an unknown,
// missing or repeated key, a wrong type, two sources of one name, a source without a path, weights
// that sum to zero, and a path that does not exist.
Mixture read_mixture(const std::filesystem::path& file);

// The same for text at hand; `origin` stands in error texts where the file's name would. Does not
// look whether the paths exist.
Mixture parse_mixture(std::string_view text,
                      std::string_view origin,
                      const std::filesystem::path& directory);

// Everything that decides which rows a mixture gives, one source a line: for hashing.
std::string canonical_text(const Mixture& mixture);

}  // namespace bifocal
