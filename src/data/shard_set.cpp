// Documents over many shards, few of them open.
#include "data/shard_set.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr std::size_t kOpenShards = 32;

// The files that `paths` name.
std::vector<std::string> shard_paths(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() == ".h5") {
        found.push_back(entry.path().string());
      }
    }
    BIFOCAL_REQUIRE(!found.empty(),
                    "[row_source] {} holds no token shard (*.h5): make some with `bifocal "
                    "tokenize`",
                    path);
    std::ranges::sort(found);
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

}  // namespace

const TokenFile& OpenShards::get(const std::string& path) {
  const auto found = places_.find(path);
  if (found != places_.end()) {
    files_.splice(files_.begin(), files_, found->second);
    return files_.front();
  }
  if (files_.size() == kOpenShards) {
    places_.erase(files_.back().path());
    files_.pop_back();
  }
  files_.emplace_front(path);
  places_.emplace(path, files_.begin());
  return files_.front();
}

ShardSet::ShardSet(const MixtureSource& source, Split split, OpenShards& open, std::string& first)
    : open_(&open) {
  for (const std::string& path : shard_paths(source.paths)) {
    add(path, split, first);
  }
  BIFOCAL_REQUIRE(documents_ > 0,
                  "[row_source] the token shards of {} hold no {} document: tokenize more, or with "
                  "another held-out share",
                  source.name,
                  split_name(split));
}

void ShardSet::add(const std::string& path, Split split, std::string& first) {
  if (first.empty()) {
    first = path;
  }
  const std::string hash = open_->get(first).header().vocabulary_hash;
  const TokenFile& file = open_->get(path);
  BIFOCAL_REQUIRE(
      file.header().vocabulary_hash == hash,
      "[row_source] {} and {} were made with different vocabularies: tokenize them with "
      "one",
      first,
      path);
  largest_id_ = std::max(largest_id_, file.largest_id());
  vocabulary_ = std::max(vocabulary_, file.header().vocabulary);
  if (file.header().split == split) {
    shards_.push_back({path, documents_, file.documents(), file.tokens()});
    documents_ += file.documents();
    tokens_ += file.tokens();
  }
}

const ShardSet::Shard& ShardSet::shard_of(std::int64_t document) const {
  const auto after =
      std::ranges::upper_bound(shards_, document, std::ranges::less(), &Shard::first_document);
  return *(after - 1);
}

const TokenFile& ShardSet::open(const Shard& shard) const {
  const TokenFile& file = open_->get(shard.path);
  BIFOCAL_REQUIRE(file.documents() == shard.documents && file.tokens() == shard.tokens,
                  "[row_source] {} is not the shard that it was when it was opened first: leave "
                  "shards alone while they are read",
                  shard.path);
  return file;
}

void ShardSet::read(std::int64_t first, std::span<std::int64_t> out) {
  BIFOCAL_ASSERT(first >= 0 && first + std::ssize(out) <= documents_);
  std::vector<std::int64_t> offsets;
  while (!out.empty()) {
    const Shard& shard = shard_of(first);
    const std::int64_t begin = first - shard.first_document;
    const std::int64_t count = std::min(std::ssize(out), shard.documents - begin);
    offsets.resize(static_cast<std::size_t>(count) + 1);
    open(shard).read_offsets(begin, offsets);
    for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
      out[i] = offsets[i + 1] - offsets[i];
    }
    out = out.subspan(static_cast<std::size_t>(count));
    first += count;
  }
}

void ShardSet::read_tokens(std::int64_t document,
                           std::int64_t begin,
                           std::span<std::int32_t> ids,
                           std::span<std::uint8_t> keep) const {
  const Shard& shard = shard_of(document);
  const TokenFile& file = open(shard);
  std::array<std::int64_t, 2> offsets{};
  file.read_offsets(document - shard.first_document, offsets);
  BIFOCAL_ASSERT(begin >= 0 && offsets[0] + begin + std::ssize(ids) <= offsets[1]);
  file.read_ids(offsets[0] + begin, ids);
  if (!keep.empty()) {
    file.read_keep(offsets[0] + begin, keep);
  }
}

}  // namespace bifocal
