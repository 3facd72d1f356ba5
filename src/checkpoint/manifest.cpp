// Writing, reading and checking of manifests.
#include "checkpoint/manifest.h"

#include <algorithm>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "core/file.h"
#include "core/sha256.h"

namespace bifocal {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormatName = "bifocal checkpoint";
constexpr std::string_view kEnd = "\n}\n";
constexpr std::string_view kChecksumStart = ",\n \"checksum\": \"";
constexpr std::string_view kChecksumEnd = "\"\n}\n";
constexpr std::size_t kHexDigits = 64;

Shape shape_of(const Json& dims) {
  Shape shape;
  for (const Json& dim : dims) {
    shape.append(dim.get<std::int64_t>());
  }
  return shape;
}

DType dtype_of(const std::string& name) {
  BIFOCAL_REQUIRE(name == name_of(DType::f32) || name == name_of(DType::f64),
                  "wanted a tensor of float32 or float64, got {}",
                  name);
  return name == name_of(DType::f32) ? DType::f32 : DType::f64;
}

void require_tensor_name(const std::string& name) {
  BIFOCAL_REQUIRE(!name.empty() && name != "." && name != ".." &&
                      name.find_first_of(std::string_view("/\0", 2)) == std::string::npos,
                  "[checkpoint] wanted a tensor name without '/', got '{}'",
                  name);
}

// A manifest must not lead out of its directory.
void require_plain_file_name(const std::string& name) {
  BIFOCAL_REQUIRE(!name.empty() && name != "." && name != ".." &&
                      name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos,
                  "wanted a file name without a path, got '{}'",
                  name);
}

// Throws unless the parts, ordered by begin, cover the tensor once.
void require_cover(const ManifestTensor& tensor) {
  std::int64_t next = 0;
  for (const TensorPart& part : tensor.parts) {
    BIFOCAL_REQUIRE(part.begin == next && part.end > part.begin,
                    "[checkpoint] tensor {} {}: wanted ranges that cover every element once, got "
                    "[{}, {}) where element {} is next",
                    tensor.name,
                    to_string(tensor.shape),
                    part.begin,
                    part.end,
                    next);
    next = part.end;
  }
  BIFOCAL_REQUIRE(next == tensor.shape.size(),
                  "[checkpoint] tensor {} {}: wanted ranges that cover all {} elements, got only "
                  "the first {}",
                  tensor.name,
                  to_string(tensor.shape),
                  tensor.shape.size(),
                  next);
}

Json chunk_table(const std::vector<StoredChunk>& chunks) {
  Json table = Json::array();
  for (const StoredChunk& chunk : chunks) {
    table.push_back({{"offset", chunk.offset}, {"bytes", chunk.bytes}, {"crc32", chunk.crc32}});
  }
  return table;
}

std::vector<StoredChunk> chunks_of(const Json& table) {
  std::vector<StoredChunk> chunks;
  for (const Json& entry : table) {
    chunks.push_back({entry.at("offset").get<std::int64_t>(),
                      entry.at("bytes").get<std::int64_t>(),
                      entry.at("crc32").get<std::uint32_t>()});
  }
  return chunks;
}

Json file_entry(const ManifestFile& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"sha256", file.sha256}};
}

ManifestFile file_of(const Json& entry) {
  return {entry.at("name").get<std::string>(),
          entry.at("bytes").get<std::int64_t>(),
          entry.at("sha256").get<std::string>()};
}

Json tensor_table(const std::vector<ManifestTensor>& tensors) {
  Json table = Json::array();
  for (const ManifestTensor& tensor : tensors) {
    Json parts = Json::array();
    for (const TensorPart& part : tensor.parts) {
      parts.push_back({{"file", part.file}, {"begin", part.begin}, {"end", part.end}});
      if (!part.chunks.empty()) {
        parts.back()["chunks"] = chunk_table(part.chunks);
      }
    }
    table.push_back({{"name", tensor.name},
                     {"dtype", name_of(tensor.dtype)},
                     {"shape", dims_of(tensor.shape)},
                     {"parts", parts}});
  }
  return table;
}

void require_part(const ManifestTensor& tensor,
                  const TensorPart& part,
                  const std::vector<ManifestFile>& files) {
  BIFOCAL_REQUIRE(part.file >= 0 && part.file < static_cast<std::int64_t>(files.size()),
                  "tensor {} names file {} of {}",
                  tensor.name,
                  part.file,
                  files.size());
  const std::int64_t file_bytes = files[static_cast<std::size_t>(part.file)].bytes;
  for (const StoredChunk& chunk : part.chunks) {
    BIFOCAL_REQUIRE(chunk.offset >= 0 && chunk.bytes > 0 && chunk.bytes <= file_bytes &&
                        chunk.offset <= file_bytes - chunk.bytes,
                    "tensor {} has a chunk of {} bytes at {}, in a file of {}",
                    tensor.name,
                    chunk.bytes,
                    chunk.offset,
                    file_bytes);
  }
}

std::vector<ManifestTensor> tensors_of(const Json& table, const std::vector<ManifestFile>& files) {
  std::vector<ManifestTensor> tensors;
  std::set<std::string> names;
  for (const Json& entry : table) {
    ManifestTensor tensor;
    tensor.name = entry.at("name").get<std::string>();
    require_tensor_name(tensor.name);
    BIFOCAL_REQUIRE(names.insert(tensor.name).second, "tensor {} stands there twice", tensor.name);
    tensor.dtype = dtype_of(entry.at("dtype").get<std::string>());
    tensor.shape = shape_of(entry.at("shape"));
    for (const Json& part : entry.at("parts")) {
      tensor.parts.push_back({part.at("file").get<std::int64_t>(),
                              part.at("begin").get<std::int64_t>(),
                              part.at("end").get<std::int64_t>(),
                              chunks_of(part.value("chunks", Json::array()))});
      require_part(tensor, tensor.parts.back(), files);
    }
    require_cover(tensor);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

Manifest from_json(const Json& json) {
  Manifest manifest;
  manifest.info.step = json.at("step").get<std::int64_t>();
  manifest.info.stage = json.at("stage").get<std::string>();
  manifest.info.stage_step = json.at("stage_step").get<std::int64_t>();
  manifest.info.next_row = json.at("next_row").get<std::int64_t>();
  manifest.info.skipped = json.value("skipped", std::int64_t{0});  // older ones have none
  manifest.info.model_hash = json.at("model_hash").get<std::string>();
  manifest.info.configuration = json.at("configuration").get<std::string>();
  manifest.info.model_config = json.at("model_config").get<std::string>();
  BIFOCAL_REQUIRE(
      json.at("configuration_sha256").get<std::string>() == sha256_hex(manifest.info.configuration),
      "the configuration does not match its hash");
  manifest.ranks = json.at("ranks").get<std::int64_t>();
  for (const Json& file : json.at("files")) {
    manifest.files.push_back(file_of(file));
    require_plain_file_name(manifest.files.back().name);
  }
  manifest.tensors = tensors_of(json.at("tensors"), manifest.files);
  return manifest;
}

void require_checksum(const std::string& text) {
  const std::size_t field = kChecksumStart.size() + kHexDigits + kChecksumEnd.size();
  BIFOCAL_REQUIRE(text.size() > field && text.ends_with(kChecksumEnd) &&
                      text.compare(text.size() - field, kChecksumStart.size(), kChecksumStart) == 0,
                  "it does not end with its checksum");
  const std::string rest = text.substr(0, text.size() - field).append(kEnd);
  BIFOCAL_REQUIRE(
      text.compare(text.size() - kChecksumEnd.size() - kHexDigits, kHexDigits, sha256_hex(rest)) ==
          0,
      "its checksum does not match");
}

}  // namespace

std::vector<std::int64_t> dims_of(const Shape& shape) {
  std::vector<std::int64_t> dims;
  dims.reserve(Shape::kMaxRank);
  for (int dim = 0; dim < shape.rank(); ++dim) {
    dims.push_back(shape[dim]);
  }
  return dims;
}

std::string to_text(const Manifest& manifest) {
  Json files = Json::array();
  for (const ManifestFile& file : manifest.files) {
    files.push_back(file_entry(file));
  }
  const CheckpointInfo& info = manifest.info;
  const Json json{{"format", kFormatName},
                  {"format_version", kCheckpointFormatVersion},
                  {"step", info.step},
                  {"stage", info.stage},
                  {"stage_step", info.stage_step},
                  {"next_row", info.next_row},
                  {"skipped", info.skipped},
                  {"model_hash", info.model_hash},
                  {"configuration", info.configuration},
                  {"configuration_sha256", sha256_hex(info.configuration)},
                  {"model_config", info.model_config},
                  {"ranks", manifest.ranks},
                  {"files", files},
                  {"tensors", tensor_table(manifest.tensors)}};
  std::string text;
  try {
    text = json.dump(1).append("\n");
  } catch (const nlohmann::json::exception& error) {
    fail("[checkpoint] cannot write the manifest: {}: names and configuration must be UTF-8",
         error.what());
  }
  const std::string checksum = sha256_hex(text);
  text.resize(text.size() - kEnd.size());
  return text.append(kChecksumStart).append(checksum).append(kChecksumEnd);
}

Manifest parse_manifest(const std::string& text, const std::filesystem::path& path) {
  try {
    const Json json = Json::parse(text);
    BIFOCAL_REQUIRE(json.is_object() && json.value("format", "") == kFormatName,
                    "it is no manifest of a checkpoint");
    const auto version = json.at("format_version").get<std::int64_t>();
    if (version > kCheckpointFormatVersion) {
      throw NewerFormatError(
          fmt::format("[checkpoint] {}: wanted format version {} or older, got {}: read it with "
                      "the bifocal that wrote it or a newer one",
                      path.string(),
                      kCheckpointFormatVersion,
                      version));
    }
    require_checksum(text);
    BIFOCAL_REQUIRE(version == kCheckpointFormatVersion, "format version {} is unknown", version);
    return from_json(json);
  } catch (const NewerFormatError&) {
    throw;
  } catch (const std::exception& error) {
    fail("[checkpoint] {} is damaged: {}: use another checkpoint", path.string(), error.what());
  }
}

Manifest read_manifest(const std::filesystem::path& checkpoint) {
  const std::filesystem::path path = checkpoint / kManifestName;
  return parse_manifest(read_file(path), path);
}

std::string describe(const std::vector<ShardedTensor>& tensors) {
  std::vector<ManifestTensor> held;
  for (const ShardedTensor& tensor : tensors) {
    require_tensor_name(tensor.name);
    const DType dtype = tensor.data.dtype;
    BIFOCAL_REQUIRE(dtype == DType::f32 || dtype == DType::f64,
                    "[checkpoint] tensor {}: wanted float32 or float64, got {}: save the float32 "
                    "master",
                    tensor.name,
                    name_of(dtype));
    BIFOCAL_REQUIRE(0 <= tensor.begin && tensor.begin <= tensor.end &&
                        tensor.end <= tensor.global.size() &&
                        tensor.data.size() == tensor.end - tensor.begin,
                    "[checkpoint] tensor {} {}: wanted a range inside it with as many elements, "
                    "got [{}, {}) with {}",
                    tensor.name,
                    to_string(tensor.global),
                    tensor.begin,
                    tensor.end,
                    tensor.data.size());
    held.push_back({tensor.name, dtype, tensor.global, {{0, tensor.begin, tensor.end}}});
  }
  return tensor_table(held).dump();
}

std::vector<ManifestTensor> join(const std::vector<std::string>& descriptions) {
  std::map<std::string, ManifestTensor> joined;
  for (std::size_t rank = 0; rank < descriptions.size(); ++rank) {
    for (const Json& entry : Json::parse(descriptions[rank])) {
      const auto name = entry.at("name").get<std::string>();
      const DType dtype = dtype_of(entry.at("dtype").get<std::string>());
      const Shape shape = shape_of(entry.at("shape"));
      ManifestTensor& tensor =
          joined.try_emplace(name, ManifestTensor{name, dtype, shape, {}}).first->second;
      BIFOCAL_REQUIRE(tensor.dtype == dtype && tensor.shape == shape,
                      "[checkpoint] tensor {}: rank {} has {} {}, a rank before it {} {}",
                      name,
                      rank,
                      name_of(dtype),
                      to_string(shape),
                      name_of(tensor.dtype),
                      to_string(tensor.shape));
      const Json& part = entry.at("parts").at(0);
      const auto begin = part.at("begin").get<std::int64_t>();
      const auto end = part.at("end").get<std::int64_t>();
      if (end > begin) {
        tensor.parts.push_back({static_cast<std::int64_t>(rank), begin, end});
      }
    }
  }
  std::vector<ManifestTensor> tensors;
  for (auto& [name, tensor] : joined) {
    std::sort(tensor.parts.begin(),
              tensor.parts.end(),
              [](const TensorPart& a, const TensorPart& b) { return a.begin < b.begin; });
    require_cover(tensor);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::string describe(const ManifestFile& file, const std::vector<StoredRange>& ranges) {
  Json table = Json::array();
  for (const StoredRange& range : ranges) {
    table.push_back(
        {{"name", range.name}, {"begin", range.begin}, {"chunks", chunk_table(range.chunks)}});
  }
  return Json{{"file", file_entry(file)}, {"ranges", table}}.dump();
}

void add_files(Manifest& manifest, const std::vector<std::string>& descriptions) {
  std::map<std::pair<std::string, std::int64_t>, TensorPart*> parts;
  for (ManifestTensor& tensor : manifest.tensors) {
    for (TensorPart& part : tensor.parts) {
      parts[{tensor.name, part.begin}] = &part;
    }
  }
  for (const std::string& description : descriptions) {
    const Json json = Json::parse(description);
    manifest.files.push_back(file_of(json.at("file")));
    for (const Json& range : json.at("ranges")) {
      const auto found =
          parts.find({range.at("name").get<std::string>(), range.at("begin").get<std::int64_t>()});
      BIFOCAL_ASSERT(found != parts.end());
      found->second->chunks = chunks_of(range.at("chunks"));
    }
  }
}

}  // namespace bifocal
