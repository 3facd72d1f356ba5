// Writing safetensors: headers first, then the tensors in the declared order.
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "hf/convert.h"
#include "hf/safetensors.h"
#include "hf/safetensors_types.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::uint64_t bytes_of(const SafetensorsWriter::Declaration& declaration) {
  return static_cast<std::uint64_t>(declaration.shape.size()) * size_of(declaration.dtype);
}

// A file that is written under a temporary name.
class OutputFile {
 public:
  explicit OutputFile(fs::path final_path)
      : final_(std::move(final_path)), temporary_(final_.string() + ".tmp") {
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    require(descriptor_ >= 0, "create");
  }

  ~OutputFile() {
    if (descriptor_ >= 0) {
      ::close(descriptor_);
    }
    if (!is_published_) {
      std::error_code ignored;
      fs::remove(temporary_, ignored);
    }
  }

  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  OutputFile(OutputFile&&) = delete;
  OutputFile& operator=(OutputFile&&) = delete;

  void write(const void* data, std::size_t bytes) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::write(descriptor_, next, bytes);
      if (written < 0 && errno == EINTR) {
        continue;
      }
      require(written > 0, "write");
      next += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }

  // Everything is on the disk afterwards, still under the temporary name.
  void close() {
    require(::fsync(descriptor_) == 0, "flush");
    require(::close(std::exchange(descriptor_, -1)) == 0, "close");
  }

  void publish() {
    std::error_code error;
    fs::rename(temporary_, final_, error);
    BIFOCAL_REQUIRE(!error,
                    "[safetensors] cannot rename {} to {}: {}",
                    temporary_.string(),
                    final_.string(),
                    error.message());
    is_published_ = true;
  }

 private:
  void require(bool succeeded, const char* what) const {
    BIFOCAL_REQUIRE(succeeded,
                    "[safetensors] cannot {} {}: {}",
                    what,
                    temporary_.string(),
                    std::strerror(errno));
  }

  fs::path final_;
  fs::path temporary_;
  int descriptor_ = -1;
  bool is_published_ = false;
};

}  // namespace

struct SafetensorsWriter::Impl {
  fs::path directory;
  std::vector<Declaration> declarations;
  std::vector<std::size_t> ends;  // one past the last declaration of each shard
  std::size_t next = 0;           // declaration that comes next
  std::vector<std::unique_ptr<OutputFile>> files;
  std::vector<std::byte> buffer;

  void cut_shards(std::uint64_t shard_bytes);
  std::string shard_name(std::size_t shard) const;
  void open_next_shard();
  void write_header();
  void write_index() const;
};

void SafetensorsWriter::Impl::cut_shards(std::uint64_t shard_bytes) {
  std::uint64_t used = 0;
  for (std::size_t i = 0; i < declarations.size(); ++i) {
    const std::uint64_t bytes = bytes_of(declarations[i]);
    if (used > 0 && used + bytes > shard_bytes) {
      ends.push_back(i);
      used = 0;
    }
    used += bytes;
  }
  ends.push_back(declarations.size());
}

std::string SafetensorsWriter::Impl::shard_name(std::size_t shard) const {
  return ends.size() == 1 ? std::string("model.safetensors")
                          : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, ends.size());
}

void SafetensorsWriter::Impl::write_header() {
  const std::size_t begin = files.size() == 1 ? 0 : ends[files.size() - 2];
  Json header{{"__metadata__", {{"format", "pt"}}}};
  std::uint64_t offset = 0;
  for (std::size_t i = begin; i < ends[files.size() - 1]; ++i) {
    const Declaration& declaration = declarations[i];
    Json shape = Json::array();
    for (int dim = 0; dim < declaration.shape.rank(); ++dim) {
      shape.push_back(declaration.shape[dim]);
    }
    const std::uint64_t end = offset + bytes_of(declaration);
    header[declaration.name] = {{"dtype", safetensors_name(declaration.dtype)},
                                {"shape", std::move(shape)},
                                {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // the data then begins at a multiple of 8
  const std::uint64_t length = text.size();
  files.back()->write(&length, sizeof length);
  files.back()->write(text.data(), text.size());
}

void SafetensorsWriter::Impl::open_next_shard() {
  if (!files.empty()) {
    files.back()->close();
  }
  files.push_back(std::make_unique<OutputFile>(directory / shard_name(files.size())));
  write_header();
}

void SafetensorsWriter::Impl::write_index() const {
  Json weights = Json::object();
  std::uint64_t total = 0;
  std::size_t shard = 0;
  for (std::size_t i = 0; i < declarations.size(); ++i) {
    shard += i == ends[shard] ? 1 : 0;
    weights[declarations[i].name] = shard_name(shard);
    total += bytes_of(declarations[i]);
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weights)}};
  write_file_atomically(directory / "model.safetensors.index.json", index.dump(2) + "\n");
}

SafetensorsWriter::SafetensorsWriter(const fs::path& directory,
                                     const std::vector<Declaration>& declarations,
                                     std::uint64_t shard_bytes)
    : impl_(std::make_unique<Impl>()) {
  BIFOCAL_REQUIRE(fs::is_directory(directory),
                  "[safetensors] {} is not a directory: create it first",
                  directory.string());
  impl_->directory = directory;
  impl_->declarations = declarations;
  impl_->cut_shards(shard_bytes);
  impl_->open_next_shard();
}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;

void SafetensorsWriter::write(const std::string& name, const ConstTensorView& tensor) {
  Impl& impl = *impl_;
  BIFOCAL_REQUIRE(impl.next < impl.declarations.size() &&
                      impl.declarations[impl.next].name == name &&
                      impl.declarations[impl.next].shape == tensor.shape,
                  "[safetensors] tensor \"{}\" {} was not declared to come next",
                  name,
                  to_string(tensor.shape));
  if (impl.next == impl.ends[impl.files.size() - 1]) {
    impl.open_next_shard();
  }
  const Declaration& declaration = impl.declarations[impl.next];
  if (declaration.dtype == tensor.dtype) {
    impl.files.back()->write(tensor.data, tensor.bytes());
  } else {
    impl.buffer.resize(bytes_of(declaration));
    const TensorView converted{impl.buffer.data(), declaration.dtype, declaration.shape};
    convert_elements(
        name.c_str(), static_cast<const std::byte*>(tensor.data), tensor.dtype, converted);
    impl.files.back()->write(impl.buffer.data(), impl.buffer.size());
  }
  ++impl.next;
}

void SafetensorsWriter::finish() {
  Impl& impl = *impl_;
  BIFOCAL_REQUIRE(impl.next == impl.declarations.size(),
                  "[safetensors] {} of {} declared tensors were written",
                  impl.next,
                  impl.declarations.size());
  impl.files.back()->close();
  for (const std::unique_ptr<OutputFile>& file : impl.files) {
    file->publish();
  }
  if (impl.files.size() > 1) {
    impl.write_index();
  }
}

}  // namespace bifocal
