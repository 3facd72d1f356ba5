// The safetensors format: memory-mapped reading of slices, and writing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace bifocal {

struct SafetensorsEntry {
  DType dtype = DType::f32;
  Shape shape;
  const std::byte* data = nullptr;  // in the mapping, at any alignment
  std::filesystem::path file;
};

// All tensors of a Hugging Face directory: model.safetensors, or the shards that
// model.safetensors.index.json names. Files are mapped; only pages that are read are loaded. Throws
// Error for anything malformed: headers over 100 MB, ranges that overlap, leave holes, do not match
// their shape or pass the file's end, unknown types, repeated names, index entries that leave the
// directory (links followed) or name tensors the file lacks. What a header claims allocates
// nothing.
class SafetensorsReader {
 public:
  // A directory or one .safetensors file.
  explicit SafetensorsReader(const std::filesystem::path& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::map<std::string, SafetensorsEntry>& entries() const;
  bool contains(const std::string& name) const;
  // Throws Error naming the tensor and the directory.
  const SafetensorsEntry& at(const std::string& name) const;
  // Flat elements [begin, begin + destination.size()) of a tensor, converted to destination's type
  // (f64, f32, bf16, f16; integers only to the same type).
  void read(const std::string& name, std::int64_t begin, const TensorView& destination) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Writes model.safetensors, or model-00001-of-0000N.safetensors with model.safetensors.index.json
// when the tensors exceed shard_bytes. Tensors are declared first, then written in that order, so
// none but the current one need exist in memory. Throws Error when a write fails, naming the file.
class SafetensorsWriter {
 public:
  struct Declaration {
    std::string name;
    DType dtype;
    Shape shape;
  };

  SafetensorsWriter(const std::filesystem::path& directory,
                    const std::vector<Declaration>& declarations,
                    std::uint64_t shard_bytes = 5'000'000'000);
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
  // The next tensor, converted to its declared type.
  void write(const std::string& name, const ConstTensorView& tensor);
  // Closes the files and writes the index. Without it, the temporary files are removed in the
  // destructor.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace bifocal
