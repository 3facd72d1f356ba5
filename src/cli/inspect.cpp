// `bifocal inspect`: tensors, shapes, types and sums of checkpoints, safetensors and HDF5 files.
#include <algorithm>
#include <memory>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/hdf5_file.h"
#include "checkpoint/manifest.h"
#include "cli/commands.h"
#include "cli/hdf5_listing.h"
#include "core/error.h"
#include "core/log.h"
#include "hf/safetensors.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kPiece = 1 << 20;  // elements that are read at once

struct Sums {
  double sum = 0.0;
  double squares = 0.0;

  void add(const ConstTensorView& piece) {
    const auto* values = piece.as<double>();
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      sum += values[i];
      squares += values[i] * values[i];
    }
  }
};

class Table {
 public:
  explicit Table(bool has_sums) : has_sums_(has_sums) {
    fmt::print("{:<58}{:<10}{:<22}{:>14}", "name", "type", "shape", "elements");
    fmt::print("{}\n", has_sums ? fmt::format("{:>24}{:>24}", "sum", "sum of squares") : "");
  }

  // sums: nothing where the elements are no numbers.
  void add(const std::string& name,
           std::string_view type,
           const std::string& shape,
           std::int64_t elements,
           const std::optional<Sums>& sums) {
    fmt::print("{:<57} {:<9} {:<21} {:>14}", name, type, shape, format_count(elements));
    if (has_sums_ && sums.has_value()) {
      fmt::print("{:>24.15g}{:>24.15g}", sums->sum, sums->squares);
    }
    fmt::print("\n");
    ++tensors_;
    elements_ += elements;
  }

  void print_total() const {
    fmt::print("{} tensors, {} elements\n", format_count(tensors_), format_count(elements_));
  }

 private:
  bool has_sums_;
  std::int64_t tensors_ = 0;
  std::int64_t elements_ = 0;
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t dim : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  }
  return text + "]";
}

// Integers are summed through their own type, since only floats are converted while reading.
template <class T>
void add_integers(const SafetensorsReader& reader,
                  const std::string& name,
                  std::int64_t size,
                  Sums& sums) {
  std::vector<T> values(static_cast<std::size_t>(std::min(size, kPiece)));
  std::vector<double> wide(values.size());
  for (std::int64_t begin = 0; begin < size; begin += kPiece) {
    const std::int64_t count = std::min(kPiece, size - begin);
    reader.read(name, begin, {values.data(), kDTypeOf<T>, {count}});
    std::transform(values.begin(), values.begin() + count, wide.begin(), [](T value) {
      return static_cast<double>(value);
    });
    sums.add({wide.data(), DType::f64, {count}});
  }
}

Sums sums_of(const SafetensorsReader& reader, const std::string& name) {
  const SafetensorsEntry& entry = reader.at(name);
  const std::int64_t size = entry.shape.size();
  Sums sums;
  switch (entry.dtype) {
    case DType::i64:
      add_integers<std::int64_t>(reader, name, size, sums);
      return sums;
    case DType::i32:
      add_integers<std::int32_t>(reader, name, size, sums);
      return sums;
    case DType::u8:
      add_integers<std::uint8_t>(reader, name, size, sums);
      return sums;
    case DType::f64:
    case DType::f32:
    case DType::bf16:
    case DType::f16:
      break;
  }
  std::vector<double> values(static_cast<std::size_t>(std::min(size, kPiece)));
  for (std::int64_t begin = 0; begin < size; begin += kPiece) {
    const TensorView piece{values.data(), DType::f64, {std::min(kPiece, size - begin)}};
    reader.read(name, begin, piece);
    sums.add(piece);
  }
  return sums;
}

void inspect_safetensors(const fs::path& path, bool wants_sums) {
  const SafetensorsReader reader(path);
  Table table(wants_sums);
  for (const auto& [name, entry] : reader.entries()) {
    table.add(name,
              name_of(entry.dtype),
              to_string(entry.shape),
              entry.shape.size(),
              wants_sums ? std::optional(sums_of(reader, name)) : std::nullopt);
  }
  table.print_total();
}

Sums sums_of(const std::vector<RankFile>& files, const ManifestTensor& tensor) {
  Sums sums;
  std::vector<double> values;
  for (const TensorPart& part : tensor.parts) {
    for (std::int64_t begin = part.begin; begin < part.end; begin += kPiece) {
      const std::int64_t count = std::min(kPiece, part.end - begin);
      values.resize(static_cast<std::size_t>(count));
      const TensorView piece{values.data(), DType::f64, {count}};
      files[static_cast<std::size_t>(part.file)].read(tensor.name, part.begin, begin, piece);
      sums.add(piece);
    }
  }
  return sums;
}

void inspect_checkpoint(const fs::path& path, bool wants_sums) {
  const Manifest manifest = read_manifest(path);
  std::vector<RankFile> files;
  if (wants_sums) {
    for (const ManifestFile& file : manifest.files) {
      files.emplace_back(path / file.name);
    }
  }
  fmt::print("{}: step {}, stage {} after {} steps, next row {}, saved by {} ranks\n",
             path.string(),
             manifest.info.step,
             manifest.info.stage,
             manifest.info.stage_step,
             manifest.info.next_row,
             manifest.ranks);
  Table table(wants_sums);
  for (const ManifestTensor& tensor : manifest.tensors) {
    table.add(tensor.name,
              name_of(tensor.dtype),
              to_string(tensor.shape),
              tensor.shape.size(),
              wants_sums ? std::optional(sums_of(files, tensor)) : std::nullopt);
  }
  table.print_total();
}

void inspect_hdf5(const fs::path& path, bool wants_sums) {
  const Hdf5Listing listing(path);
  for (const auto& [name, value] : listing.attributes()) {
    if (!value.empty()) {
      fmt::print("{}: {}\n", name, value);
    }
  }
  Table table(wants_sums);
  for (const Hdf5Dataset& dataset : listing.datasets()) {
    std::int64_t elements = 1;
    for (const std::int64_t dim : dataset.shape) {
      elements *= dim;
    }
    std::optional<Sums> sums;
    if (wants_sums && dataset.is_number) {
      sums.emplace();
      listing.read(dataset, [&](const ConstTensorView& piece) { sums->add(piece); });
    }
    table.add(dataset.name, dataset.type, shape_text(dataset.shape), elements, sums);
  }
  table.print_total();
}

void inspect_directory(const fs::path& path, bool wants_sums) {
  if (fs::exists(path / kManifestName)) {
    inspect_checkpoint(path, wants_sums);
    return;
  }
  const fs::path inner = path / "checkpoints";
  if (const auto latest = latest_checkpoint(fs::is_directory(inner) ? inner : path)) {
    inspect_checkpoint(*latest, wants_sums);
    return;
  }
  inspect_safetensors(path, wants_sums);
}

void run_inspect(const fs::path& path, bool wants_sums) {
  BIFOCAL_REQUIRE(fs::exists(path), "[inspect] no file or directory {}", path.string());
  if (fs::is_directory(path)) {
    inspect_directory(path, wants_sums);
  } else if (path.extension() == ".safetensors") {
    inspect_safetensors(path, wants_sums);
  } else {
    inspect_hdf5(path, wants_sums);
  }
}

}  // namespace

void add_inspect_command(CLI::App& app, const CommandContext& context) {
  auto path = std::make_shared<std::string>();
  auto wants_sums = std::make_shared<bool>(false);
  CLI::App* command =
      app.add_subcommand("inspect", "List the tensors of a checkpoint, safetensors or HDF5 file");
  command
      ->add_option(
          "path", *path, "Run, checkpoint, Hugging Face directory, .safetensors file or HDF5 file")
      ->required();
  command->add_flag("--sums", *wants_sums, "Also sum the elements and their squares");
  command->callback([path, wants_sums, &context] {
    require_one_rank(context, "inspect");
    run_inspect(*path, *wants_sums);
  });
}

}  // namespace bifocal
