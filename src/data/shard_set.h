// The token shards of one source as one run of documents.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/document_order.h"
#include "data/mixture.h"
#include "data/token_file.h"

namespace bifocal {

// Shards that are open; the one that was not used for longest is closed for another.
class OpenShards {
 public:
  // Opens the shard where it is not. The reference holds until the next call. Throws Error as
  // TokenFile does.
  const TokenFile& get(const std::string& path);

 private:
  std::list<TokenFile> files_;  // the last used one first
  std::unordered_map<std::string, std::list<TokenFile>::iterator> places_;
};

// Documents of one split, numbered over all shards in order. A few numbers per shard are kept;
// everything else is read when it is asked for. Not for several threads at once.
class ShardSet final : public DocumentLengths {
 public:
  struct Shard {
    std::string path;
    std::int64_t first_document;
    std::int64_t documents;
    std::int64_t tokens;
  };

  // A directory stands for its *.h5 files in the order of their names. Shards of the other split
  // are left out. Throws Error for missing or corrupt shards and those without the vocabulary hash
  // of `first`, a shard (empty: the first one met, which is then set). `open` must outlive the set.
  ShardSet(const MixtureSource& source, Split split, OpenShards& open, std::string& first);

  const std::vector<Shard>& shards() const { return shards_; }

  std::int64_t documents() const override { return documents_; }

  std::int64_t tokens() const { return tokens_; }

  // Over the shards of both splits.
  std::int32_t largest_id() const { return largest_id_; }

  std::int64_t vocabulary() const { return vocabulary_; }

  void read(std::int64_t first, std::span<std::int64_t> out) override;

  // Reads tokens [begin, begin + ids.size()) of a document; keep is as long, or empty where it is
  // not wanted. Throws Error for corrupt bytes.
  void read_tokens(std::int64_t document,
                   std::int64_t begin,
                   std::span<std::int32_t> ids,
                   std::span<std::uint8_t> keep) const;

 private:
  void add(const std::string& path, Split split, std::string& first);
  const Shard& shard_of(std::int64_t document) const;
  const TokenFile& open(const Shard& shard) const;

  OpenShards* open_;
  std::vector<Shard> shards_;
  std::int64_t documents_ = 0;
  std::int64_t tokens_ = 0;
  std::int32_t largest_id_ = 0;
  std::int64_t vocabulary_ = 0;
};

}  // namespace bifocal
