// Safetensors files as read-only mappings.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <limits>
#include <set>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "hf/convert.h"
#include "hf/safetensors.h"
#include "hf/safetensors_types.h"
#include "hf/strict_json.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::uint64_t kMaxHeader = 100'000'000;
constexpr std::uint64_t kPrefix = 8;  // bytes that hold the header's length
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

class Mapping {
 public:
  explicit Mapping(const fs::path& file) {
    // Without O_NONBLOCK a named pipe in a file's place would be waited for.
    const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    BIFOCAL_REQUIRE(
        descriptor >= 0, "[safetensors] cannot open {}: {}", file.string(), std::strerror(errno));

    struct stat status {};

    const bool known = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
    size_ = known ? static_cast<std::size_t>(status.st_size) : 0;
    void* data = MAP_FAILED;
    if (size_ >= kPrefix) {  // less is refused below, and a mapping would be left behind
      data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    }
    const int code = errno;
    ::close(descriptor);
    BIFOCAL_REQUIRE(known, "[safetensors] {} is not a regular file", file.string());
    BIFOCAL_REQUIRE(size_ >= kPrefix,
                    "[safetensors] {} has {} bytes, too few for a header: the file is truncated",
                    file.string(),
                    size_);
    BIFOCAL_REQUIRE(
        data != MAP_FAILED, "[safetensors] cannot map {}: {}", file.string(), std::strerror(code));
    data_ = static_cast<const std::byte*>(data);
  }

  ~Mapping() {
    if (data_ != nullptr) {
      ::munmap(const_cast<std::byte*>(data_), size_);
    }
  }

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

  Mapping& operator=(Mapping&&) = delete;

  const std::byte* data() const { return data_; }

  std::uint64_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// The header's depth and lists are those of the format: a description holds no more than a shape.
Json parse_header(std::string_view text, const fs::path& file) {
  const std::string where = fmt::format("[safetensors] {}: the header", file.string());
  BIFOCAL_REQUIRE(text.starts_with('{'), "{} must begin with an opening brace", where);
  return parse_strict_json<Json>(text, where, {.depth = 3, .items = 16});
}

struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::string name;
};

Shape parse_shape(const Json& json, const std::string& where) {
  BIFOCAL_REQUIRE(json.is_array() && json.size() <= static_cast<std::size_t>(Shape::kMaxRank),
                  "[safetensors] {}: wanted a shape of at most {} numbers",
                  where,
                  Shape::kMaxRank);
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max() / 16;
  std::uint64_t elements = 1;
  Shape shape;
  for (const Json& dim : json) {
    BIFOCAL_REQUIRE(dim.is_number_unsigned(), "[safetensors] {}: wanted whole sizes", where);
    const auto size = dim.get<std::uint64_t>();
    BIFOCAL_REQUIRE(size <= kMost && (size == 0 || elements <= kMost / size),
                    "[safetensors] {}: the shape has too many elements",
                    where);
    elements *= size;
    shape.append(static_cast<std::int64_t>(size));
  }
  return shape;
}

// One tensor's description; its range is relative to the data after the header.
std::pair<SafetensorsEntry, Range> parse_entry(const std::string& name,
                                               const Json& json,
                                               const fs::path& file) {
  const std::string where = fmt::format("{}: tensor \"{}\"", file.string(), name);
  BIFOCAL_REQUIRE(json.is_object() && json.contains("dtype") && json["dtype"].is_string() &&
                      json.contains("shape") && json.contains("data_offsets"),
                  "[safetensors] {}: wanted dtype, shape and data_offsets",
                  where);
  const auto& type_name = json["dtype"].get_ref<const std::string&>();
  const std::optional<DType> type = parse_safetensors_type(type_name);
  BIFOCAL_REQUIRE(type.has_value(),
                  "[safetensors] {}: type {} is not supported: convert it to BF16, F16, F32 or F64",
                  where,
                  type_name.substr(0, 32));
  const Json& offsets = json["data_offsets"];
  BIFOCAL_REQUIRE(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() &&
                      offsets[1].is_number_unsigned(),
                  "[safetensors] {}: data_offsets must be two whole numbers",
                  where);
  SafetensorsEntry entry;
  entry.dtype = *type;
  entry.shape = parse_shape(json["shape"], where);
  entry.file = file;
  Range range{offsets[0].get<std::uint64_t>(), offsets[1].get<std::uint64_t>(), name};
  const auto bytes = static_cast<std::uint64_t>(entry.shape.size()) * size_of(entry.dtype);
  BIFOCAL_REQUIRE(range.begin <= range.end && range.end - range.begin == bytes,
                  "[safetensors] {}: {} {} needs {} bytes, data_offsets are [{}, {}]",
                  where,
                  type_name,
                  to_string(entry.shape),
                  bytes,
                  range.begin,
                  range.end);
  return {std::move(entry), std::move(range)};
}

// The format wants the data covered exactly once: no overlap, no hole, nothing behind the end.
void check_ranges(std::vector<Range>& ranges, std::uint64_t data_bytes, const fs::path& file) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::uint64_t covered = 0;
  for (const Range& range : ranges) {
    BIFOCAL_REQUIRE(range.begin == covered,
                    "[safetensors] {}: tensor \"{}\" begins at byte {} of the data, wanted {}: "
                    "ranges must neither overlap nor leave holes",
                    file.string(),
                    range.name,
                    range.begin,
                    covered);
    covered = range.end;
  }
  BIFOCAL_REQUIRE(covered == data_bytes,
                  "[safetensors] {}: the header describes {} bytes of data, the file has {}: it is "
                  "truncated or not complete: copy it again",
                  file.string(),
                  covered,
                  data_bytes);
}

std::map<std::string, SafetensorsEntry> read_entries(const Mapping& mapping, const fs::path& file) {
  std::uint64_t length = 0;
  std::memcpy(&length, mapping.data(), kPrefix);
  BIFOCAL_REQUIRE(length <= kMaxHeader,
                  "[safetensors] {}: a header of {} bytes is over the limit of {}: this is not a "
                  "safetensors file",
                  file.string(),
                  length,
                  kMaxHeader);
  BIFOCAL_REQUIRE(length <= mapping.size() - kPrefix,
                  "[safetensors] {}: the header takes {} bytes, the file has {}: it is truncated",
                  file.string(),
                  length,
                  mapping.size());
  const auto* text = reinterpret_cast<const char*>(mapping.data() + kPrefix);
  const Json header = parse_header({text, length}, file);
  std::map<std::string, SafetensorsEntry> entries;
  std::vector<Range> ranges;
  for (const auto& [name, json] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    auto [entry, range] = parse_entry(name, json, file);
    ranges.push_back(std::move(range));
    entries.emplace(name, std::move(entry));
  }
  check_ranges(ranges, mapping.size() - kPrefix - length, file);
  for (const Range& range : ranges) {
    entries.at(range.name).data = mapping.data() + kPrefix + length + range.begin;
  }
  return entries;
}

// weight_map of the index: tensor name to file name.
std::map<std::string, std::string> read_index(const fs::path& index) {
  const std::string where = fmt::format("[safetensors] {}", index.string());
  const Json json = parse_strict_json<Json>(
      read_small_file(index, kMaxHeader, where), where, {.depth = 8, .items = 1024});
  BIFOCAL_REQUIRE(
      json.contains("weight_map") && json["weight_map"].is_object() && !json["weight_map"].empty(),
      "{}: wanted a weight_map of tensor and file names",
      where);
  std::map<std::string, std::string> files;
  for (const auto& [tensor, value] : json["weight_map"].items()) {
    BIFOCAL_REQUIRE(value.is_string(), "{}: tensor \"{}\" has no file name", where, tensor);
    const auto name = value.get<std::string>();
    const bool plain = !name.empty() && name != "." && name != ".." &&
                       name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
    BIFOCAL_REQUIRE(plain,
                    "{}: tensor \"{}\" lies in {}: shards must be files of the same directory",
                    where,
                    tensor,
                    shown(value));
    files.emplace(tensor, name);
  }
  return files;
}

// Whether a shard lies where its directory is, links followed. Hugging Face's cache keeps
// snapshots/REVISION/FILE as a link into blobs/ beside snapshots/, which counts as inside.
void require_inside(const fs::path& file, const fs::path& directory) {
  std::error_code error;
  const fs::path folder = fs::canonical(directory, error);
  const fs::path target = error ? fs::path() : fs::canonical(file, error);
  BIFOCAL_REQUIRE(!error,
                  "[safetensors] cannot open {}, which the index names: {}",
                  file.string(),
                  error.message());
  const fs::path cache = folder.parent_path();
  const bool is_inside =
      target.parent_path() == folder ||
      (cache.filename() == "snapshots" && target.parent_path() == cache.parent_path() / "blobs");
  BIFOCAL_REQUIRE(is_inside,
                  "[safetensors] {} is a link to {}, outside its directory: copy the file there",
                  file.string(),
                  target.string());
}

}  // namespace

struct SafetensorsReader::Impl {
  fs::path path;
  std::vector<Mapping> mappings;
  std::map<std::string, SafetensorsEntry> entries;

  void add_file(const fs::path& file) {
    mappings.emplace_back(file);
    for (auto& [name, entry] : read_entries(mappings.back(), file)) {
      const auto [other, is_new] = entries.emplace(name, std::move(entry));
      BIFOCAL_REQUIRE(is_new,
                      "[safetensors] tensor \"{}\" is in {} and in {}: which one counts?",
                      name,
                      other->second.file.string(),
                      file.string());
    }
  }

  void add_shards(const fs::path& index) {
    const std::map<std::string, std::string> files = read_index(index);
    std::set<std::string> names;
    for (const auto& [tensor, file] : files) {
      names.insert(file);
    }
    for (const std::string& name : names) {
      require_inside(path / name, path);
      add_file(path / name);
    }
    for (const auto& [tensor, file] : files) {
      const auto found = entries.find(tensor);
      BIFOCAL_REQUIRE(found != entries.end() && found->second.file.filename() == file,
                      "[safetensors] {} says that tensor \"{}\" is in {}, which lacks it",
                      index.string(),
                      tensor,
                      file);
    }
    for (const auto& [tensor, entry] : entries) {
      BIFOCAL_REQUIRE(
          files.contains(tensor),
          "[safetensors] {} holds tensor \"{}\", which {} does not name: the shards are "
          "of another save",
          entry.file.string(),
          tensor,
          index.filename().string());
    }
  }
};

SafetensorsReader::SafetensorsReader(const fs::path& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  if (!fs::is_directory(path)) {
    BIFOCAL_REQUIRE(
        fs::exists(path), "[safetensors] no file or directory {}: check the path", path.string());
    impl_->add_file(path);
  } else if (fs::exists(path / kSingle)) {
    impl_->add_file(path / kSingle);
  } else {
    BIFOCAL_REQUIRE(fs::exists(path / kIndex),
                    "[safetensors] {} has neither {} nor {}: give a Hugging Face directory with "
                    "safetensors weights",
                    path.string(),
                    kSingle,
                    kIndex);
    impl_->add_shards(path / kIndex);
  }
}

SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

const std::map<std::string, SafetensorsEntry>& SafetensorsReader::entries() const {
  return impl_->entries;
}

bool SafetensorsReader::contains(const std::string& name) const {
  return impl_->entries.contains(name);
}

const SafetensorsEntry& SafetensorsReader::at(const std::string& name) const {
  const auto found = impl_->entries.find(name);
  BIFOCAL_REQUIRE(found != impl_->entries.end(),
                  "[safetensors] {} has no tensor \"{}\"",
                  impl_->path.string(),
                  name);
  return found->second;
}

void SafetensorsReader::read(const std::string& name,
                             std::int64_t begin,
                             const TensorView& destination) const {
  const SafetensorsEntry& entry = at(name);
  const std::int64_t size = entry.shape.size();
  BIFOCAL_REQUIRE(0 <= begin && begin <= size && destination.size() <= size - begin,
                  "[safetensors] {}: wanted elements [{}, {}) of {}",
                  name,
                  begin,
                  begin + destination.size(),
                  size);
  const std::byte* source = entry.data + begin * static_cast<std::int64_t>(size_of(entry.dtype));
  convert_elements(name.c_str(), source, entry.dtype, destination);
}

}  // namespace bifocal
