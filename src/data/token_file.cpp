// Writing, checking and reading of token shards.
#include "data/token_file.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <functional>
#include <tuple>
#include <utility>

#include <fmt/format.h>
#include <hdf5.h>

#include "core/error.h"
#include "core/file.h"
#include "core/sha256.h"

namespace bifocal {

namespace {

constexpr std::string_view kFormat = "bifocal tokens";
constexpr std::int64_t kFormatVersion = 1;
// Elements of a chunk: what one access to a few of them must read and check.
constexpr hsize_t kTokenChunk = 16384;
constexpr hsize_t kOffsetChunk = 1024;  // offsets are read in pairs from all over the file
constexpr std::size_t kChunkCache = std::size_t{128} << 10;  // bytes, of each dataset read

Hdf5Handle string_type(std::size_t length) {
  Hdf5Handle type(BIFOCAL_HDF5(H5Tcopy(H5T_C_S1)), H5Tclose);
  BIFOCAL_HDF5(H5Tset_size(type.get(), std::max<std::size_t>(length, 1)));
  BIFOCAL_HDF5(H5Tset_strpad(type.get(), H5T_STR_NULLPAD));
  return type;
}

void write_attribute(hid_t file, const char* name, hid_t type, const void* value) {
  const Hdf5Handle space(BIFOCAL_HDF5(H5Screate(H5S_SCALAR)), H5Sclose);
  const Hdf5Handle attribute(
      BIFOCAL_HDF5(H5Acreate2(file, name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT)), H5Aclose);
  BIFOCAL_HDF5(H5Awrite(attribute.get(), type, value));
}

void write_attribute(hid_t file, const char* name, std::string_view text) {
  const Hdf5Handle type = string_type(text.size());
  write_attribute(file, name, type.get(), text.data());
}

void write_attribute(hid_t file, const char* name, std::int64_t value) {
  write_attribute(file, name, H5T_NATIVE_INT64, &value);
}

std::string read_text_attribute(hid_t file, const char* name) {
  const Hdf5Lock lock;
  const Hdf5Handle attribute(BIFOCAL_HDF5(H5Aopen(file, name, H5P_DEFAULT)), H5Aclose);
  const Hdf5Handle stored(BIFOCAL_HDF5(H5Aget_type(attribute.get())), H5Tclose);
  BIFOCAL_REQUIRE(H5Tget_class(stored.get()) == H5T_STRING &&
                      BIFOCAL_HDF5(H5Tis_variable_str(stored.get())) == 0,
                  "[token_file] attribute {} is no text of fixed length",
                  name);
  std::string text(H5Tget_size(stored.get()), '\0');
  const Hdf5Handle type = string_type(text.size());
  BIFOCAL_HDF5(H5Aread(attribute.get(), type.get(), text.data()));
  text.resize(std::min(text.find('\0'), text.size()));
  return text;
}

std::int64_t read_number_attribute(hid_t file, const char* name) {
  const Hdf5Handle attribute(BIFOCAL_HDF5(H5Aopen(file, name, H5P_DEFAULT)), H5Aclose);
  std::int64_t value = 0;
  BIFOCAL_HDF5(H5Aread(attribute.get(), H5T_NATIVE_INT64, &value));
  return value;
}

// Types as stored (little endian) and as in memory.
void write_dataset(hid_t file,
                   const char* name,
                   std::pair<hid_t, hid_t> stored_and_native,
                   std::size_t size,
                   hsize_t largest_chunk,
                   const void* data) {
  const hid_t stored = stored_and_native.first;
  const hid_t native = stored_and_native.second;
  const hsize_t extent = size;
  const hsize_t chunk = std::min<hsize_t>(extent, largest_chunk);
  const Hdf5Handle space(BIFOCAL_HDF5(H5Screate_simple(1, &extent, nullptr)), H5Sclose);
  const Hdf5Handle properties(BIFOCAL_HDF5(H5Pcreate(H5P_DATASET_CREATE)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_chunk(properties.get(), 1, &chunk));
  BIFOCAL_HDF5(H5Pset_fletcher32(properties.get()));
  BIFOCAL_HDF5(H5Pset_obj_track_times(properties.get(), false));  // equal documents, equal bytes
  const Hdf5Handle dataset(
      BIFOCAL_HDF5(
          H5Dcreate2(file, name, stored, space.get(), H5P_DEFAULT, properties.get(), H5P_DEFAULT)),
      H5Dclose);
  BIFOCAL_HDF5(H5Dwrite(dataset.get(), native, H5S_ALL, H5S_ALL, H5P_DEFAULT, data));
}

// A dataset of one dimension and its length.
std::pair<Hdf5Handle, std::int64_t> open_dataset(hid_t file, const char* name) {
  const Hdf5Handle access(BIFOCAL_HDF5(H5Pcreate(H5P_DATASET_ACCESS)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_chunk_cache(
      access.get(), H5D_CHUNK_CACHE_NSLOTS_DEFAULT, kChunkCache, H5D_CHUNK_CACHE_W0_DEFAULT));
  Hdf5Handle dataset(BIFOCAL_HDF5(H5Dopen2(file, name, access.get())), H5Dclose);
  const Hdf5Handle space(BIFOCAL_HDF5(H5Dget_space(dataset.get())), H5Sclose);
  BIFOCAL_REQUIRE(BIFOCAL_HDF5(H5Sget_simple_extent_ndims(space.get())) == 1,
                  "[token_file] dataset {} should have one dimension",
                  name);
  hsize_t extent = 0;
  BIFOCAL_HDF5(H5Sget_simple_extent_dims(space.get(), &extent, nullptr));
  return {std::move(dataset), static_cast<std::int64_t>(extent)};
}

void read_range(hid_t dataset, hid_t type, std::int64_t begin, std::size_t size, void* out) {
  const auto start = static_cast<hsize_t>(begin);
  const hsize_t count = size;
  const Hdf5Handle from(BIFOCAL_HDF5(H5Dget_space(dataset)), H5Sclose);
  const Hdf5Handle into(BIFOCAL_HDF5(H5Screate_simple(1, &count, nullptr)), H5Sclose);
  BIFOCAL_HDF5(H5Sselect_hyperslab(from.get(), H5S_SELECT_SET, &start, nullptr, &count, nullptr));
  BIFOCAL_HDF5(H5Dread(dataset, type, into.get(), from.get(), H5P_DEFAULT, out));
}

// Refuses what has not the form of checked_metadata before HDF5 parses it: damage in older forms,
// which carry no checksums, can crash the library.
void require_checked_metadata(const std::string& path) {
  constexpr std::string_view kStart =
      "\x89HDF\r\n\x1a\n\x03";  // signature, version 3 of the superblock
  std::array<char, kStart.size()> start{};
  std::ifstream file(path, std::ios::binary);
  file.read(start.data(), start.size());
  BIFOCAL_REQUIRE(file && std::string_view(start.data(), start.size()) == kStart,
                  "it does not begin like an HDF5 file with checksums");
}

// Metadata in the newest form that HDF5 1.10 writes, which carries checksums.
Hdf5Handle checked_metadata() {
  Hdf5Handle access(BIFOCAL_HDF5(H5Pcreate(H5P_FILE_ACCESS)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110));
  return access;
}

}  // namespace

std::string vocabulary_hash(std::span<const std::string> words) {
  Sha256 hash;
  for (const std::string& word : words) {
    hash.add(word.data(), word.size());
    hash.add("\n", 1);
  }
  return hash.hex();
}

std::string vocabulary_hash(std::int64_t size) {
  return sha256_hex(fmt::format("ids below {}", size));
}

Split split_of(std::span<const std::int32_t> ids, double held_out_share) {
  Sha256 hash;
  hash.add(ids.data(), ids.size_bytes());
  const std::uint64_t bits = std::stoull(hash.hex().substr(0, 16), nullptr, 16);
  return static_cast<double>(bits) * 0x1.0p-64 < held_out_share ? Split::held_out : Split::train;
}

std::string_view split_name(Split split) {
  return split == Split::train ? "train" : "held_out";
}

TokenFileWriter::TokenFileWriter(TokenFileHeader header) : header_(std::move(header)) {}

void TokenFileWriter::append(std::span<const std::int32_t> ids,
                             std::span<const std::uint8_t> keep) {
  BIFOCAL_REQUIRE(!ids.empty(), "[token_file] a document has no token");
  BIFOCAL_REQUIRE(ids.size() == keep.size(),
                  "[token_file] keep needs one entry per token: {} tokens, {} entries",
                  ids.size(),
                  keep.size());
  const auto [least, largest] = std::ranges::minmax(ids);
  BIFOCAL_REQUIRE(least >= 0 && largest < header_.vocabulary,
                  "[token_file] ids must be from 0 to {}, got {}: is the vocabulary another one?",
                  header_.vocabulary - 1,
                  least < 0 ? least : largest);
  BIFOCAL_REQUIRE(std::ranges::max(keep) <= 1,
                  "[token_file] keep holds 0 and 1 only, got {}",
                  std::ranges::max(keep));
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  keep_.insert(keep_.end(), keep.begin(), keep.end());
  offsets_.push_back(static_cast<std::int64_t>(ids_.size()));
  largest_id_ = std::max(largest_id_, largest);
}

void TokenFileWriter::write_file(const std::string& path) const {
  const Hdf5Handle access = checked_metadata();
  const Hdf5Handle creation(BIFOCAL_HDF5(H5Pcreate(H5P_FILE_CREATE)), H5Pclose);
  BIFOCAL_HDF5(H5Pset_obj_track_times(creation.get(), false));
  Hdf5Handle file(
      BIFOCAL_HDF5(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation.get(), access.get())), H5Fclose);
  write_attribute(file.get(), "format", kFormat);
  write_attribute(file.get(), "format_version", kFormatVersion);
  write_attribute(file.get(), "vocabulary", header_.vocabulary);
  write_attribute(file.get(), "vocabulary_hash", header_.vocabulary_hash);
  write_attribute(file.get(), "split", split_name(header_.split));
  write_attribute(file.get(), "largest_id", std::int64_t{largest_id_});
  write_dataset(file.get(),
                "offsets",
                {H5T_STD_I64LE, H5T_NATIVE_INT64},
                offsets_.size(),
                kOffsetChunk,
                offsets_.data());
  write_dataset(
      file.get(), "ids", {H5T_STD_I32LE, H5T_NATIVE_INT32}, ids_.size(), kTokenChunk, ids_.data());
  write_dataset(file.get(),
                "keep",
                {H5T_STD_U8LE, H5T_NATIVE_UINT8},
                keep_.size(),
                kTokenChunk,
                keep_.data());
  file.close();
}

void TokenFileWriter::write(const std::string& path) const {
  BIFOCAL_ASSERT(documents() > 0);
  const std::string partial = path + ".partial";
  write_file(partial);
  fsync_file(partial);
  std::error_code code;
  std::filesystem::rename(partial, path, code);
  BIFOCAL_REQUIRE(!code, "[token_file] cannot rename {} to {}: {}", partial, path, code.message());
}

TokenFile::TokenFile(const std::string& path) : path_(path) {
  BIFOCAL_REQUIRE(
      std::filesystem::is_regular_file(path), "[token_file] no file {}: check the path", path);
  try {
    require_checked_metadata(path);
    file_ = Hdf5Handle(BIFOCAL_HDF5(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)), H5Fclose);
    read_header();
    open_datasets();
  } catch (const Error& error) {
    fail("[token_file] {} is no whole token shard: make it again with `bifocal tokenize` ({})",
         path,
         error.what());
  }
}

void TokenFile::read_header() {
  const std::string format = read_text_attribute(file_.get(), "format");
  BIFOCAL_REQUIRE(format == kFormat, "format should be \"{}\", got \"{}\"", kFormat, format);
  const std::int64_t version = read_number_attribute(file_.get(), "format_version");
  BIFOCAL_REQUIRE(version == kFormatVersion,
                  "format_version {} is not known here, only {}",
                  version,
                  kFormatVersion);
  header_.vocabulary = read_number_attribute(file_.get(), "vocabulary");
  header_.vocabulary_hash = read_text_attribute(file_.get(), "vocabulary_hash");
  const std::string split = read_text_attribute(file_.get(), "split");
  BIFOCAL_REQUIRE(split == split_name(Split::train) || split == split_name(Split::held_out),
                  "split should be train or held_out, got \"{}\"",
                  split);
  header_.split = split == split_name(Split::train) ? Split::train : Split::held_out;
  const std::int64_t largest = read_number_attribute(file_.get(), "largest_id");
  BIFOCAL_REQUIRE(largest >= 0 && largest < header_.vocabulary,
                  "largest_id {} is outside the vocabulary of {}",
                  largest,
                  header_.vocabulary);
  largest_id_ = static_cast<std::int32_t>(largest);
}

void TokenFile::open_datasets() {
  std::int64_t num_offsets = 0;
  std::int64_t num_keep = 0;
  std::tie(offsets_, num_offsets) = open_dataset(file_.get(), "offsets");
  std::tie(ids_, tokens_) = open_dataset(file_.get(), "ids");
  std::tie(keep_, num_keep) = open_dataset(file_.get(), "keep");
  BIFOCAL_REQUIRE(num_offsets >= 2, "offsets should have two entries or more, got {}", num_offsets);
  documents_ = num_offsets - 1;
  std::int64_t first = 0;
  std::int64_t last = 0;
  read_range(offsets_.get(), H5T_NATIVE_INT64, 0, 1, &first);
  read_range(offsets_.get(), H5T_NATIVE_INT64, documents_, 1, &last);
  BIFOCAL_REQUIRE(first == 0, "offsets should start with 0, not {}", first);
  BIFOCAL_REQUIRE(tokens_ == last && num_keep == last,
                  "offsets end at {} tokens, but there are {} ids and {} keep entries",
                  last,
                  tokens_,
                  num_keep);
}

void TokenFile::read_offsets(std::int64_t first, std::span<std::int64_t> out) const {
  BIFOCAL_ASSERT(first >= 0 && !out.empty() &&
                 first + static_cast<std::int64_t>(out.size()) <= documents_ + 1);
  try {
    read_range(offsets_.get(), H5T_NATIVE_INT64, first, out.size(), out.data());
  } catch (const Error& error) {
    fail("[token_file] {} is corrupt: make it again ({})", path_, error.what());
  }
  const auto broken = std::ranges::adjacent_find(out, std::greater_equal<>());
  BIFOCAL_REQUIRE(broken == out.end() && out.front() >= 0 && out.back() <= tokens_,
                  "[token_file] {} is corrupt: offsets should grow from 0 to {}, and do not at "
                  "entries from {} on: make it again",
                  path_,
                  tokens_,
                  first + (broken == out.end() ? 0 : broken - out.begin()));
}

void TokenFile::read_ids(std::int64_t begin, std::span<std::int32_t> out) const {
  BIFOCAL_ASSERT(begin >= 0 && begin + static_cast<std::int64_t>(out.size()) <= tokens());
  if (out.empty()) {
    return;
  }
  try {
    read_range(ids_.get(), H5T_NATIVE_INT32, begin, out.size(), out.data());
  } catch (const Error& error) {
    fail("[token_file] {} is corrupt: make it again ({})", path_, error.what());
  }
  const auto [least, largest] = std::ranges::minmax(out);
  BIFOCAL_REQUIRE(least >= 0 && largest <= largest_id_,
                  "[token_file] {} is corrupt: id {} at tokens from {} on, make it again",
                  path_,
                  least < 0 ? least : largest,
                  begin);
}

void TokenFile::read_keep(std::int64_t begin, std::span<std::uint8_t> out) const {
  BIFOCAL_ASSERT(begin >= 0 && begin + static_cast<std::int64_t>(out.size()) <= tokens());
  try {
    read_range(keep_.get(), H5T_NATIVE_UINT8, begin, out.size(), out.data());
  } catch (const Error& error) {
    fail("[token_file] {} is corrupt: make it again ({})", path_, error.what());
  }
}

}  // namespace bifocal
