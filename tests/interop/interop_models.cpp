// What tests/interop needs from the library and the program does not print: tiny random students as
// exports, and whole logits.
//   interop_models students OUT               every base type, tied and untied, every kind of mixer
//   interop_models logits MODEL DOCUMENTS OUT logits of a Hugging Face directory, as safetensors;
//                                             DOCUMENTS: a JSON object of lists of token ids
#include <cstdio>
#include <exception>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/file.h"
#include "hf/export.h"
#include "hf/hf_config.h"
#include "hf/model_tensors.h"
#include "hf/safetensors.h"
#include "model/head.h"
#include "model/row_shard.h"
#include "support/fill_weights.h"
#include "support/tiny_model.h"

namespace bifocal::test {
namespace {

namespace fs = std::filesystem;

void export_students(const fs::path& output) {
  Device device(DType::f32);
  const std::unique_ptr<Communicator> self = make_self_communicator();
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const bool is_tied : {true, false}) {
      ModelConfig teacher = tiny_teacher(family);
      teacher.tied = is_tied;
      int mixed = 0;
      for (const NamedMixers& student : tiny_students(teacher)) {
        const bool is_preset = student.name.find(':') == std::string::npos;
        const std::string name = is_preset ? student.name : fmt::format("mixed_{}", ++mixed);
        TinyModel model(device.context(), tiny_student(teacher, student.mixers), *self);
        ExportOptions options;
        options.model = model.config();
        options.teacher = output;
        options.tokenizer = output;
        options.output =
            output / fmt::format("{}-{}-{}", name_of(family), is_tied ? "tied" : "untied", name);
        options.dtype = DType::f32;
        options.origin = "random";
        options.commit = "unknown";
        export_model(options, [&](const Parameter& parameter) {
          return parameter_view(parameter, model.weights().acquire(parameter.unit));
        });
        fmt::print("{}\n", options.output.filename().string());
      }
    }
  }
}

Row document(const std::vector<std::int32_t>& ids) {
  Row row;
  row.ids = ids;
  row.start.assign(ids.size(), 0);
  row.next.assign(ids.size(), -1);
  row.keep.assign(ids.size(), 0);
  return row;
}

void write_logits(const fs::path& directory, const fs::path& documents, const fs::path& output) {
  Device device(DType::f32);
  const Context context = device.context();
  const std::unique_ptr<Communicator> self = make_self_communicator();
  const ModelConfig config = read_hf_config(directory);
  const SafetensorsReader reader(directory);
  const ParameterTable table(config);
  check_model_tensors(reader, table);
  Weights weights(
      context, table, *self, {Weights::Placement::replicated, context.dtype, Region::weights});
  fill_weights(context,
               weights,
               [&](const Parameter& parameter, std::int64_t begin, const TensorView& piece) {
                 reader.read(parameter.name, begin, piece);
               });
  weights.share();
  Decoder decoder(context, config, weights);
  const Head head(context, config, weights);

  const auto json = nlohmann::json::parse(read_file(documents));
  std::vector<SafetensorsWriter::Declaration> declarations;
  for (const auto& [name, ids] : json.items()) {
    declarations.push_back(
        {name, DType::f32, {static_cast<std::int64_t>(ids.size()), config.vocabulary}});
  }
  fs::create_directories(output);
  SafetensorsWriter writer(output, declarations);
  for (const auto& [name, ids] : json.items()) {
    const Row row = document(ids.get<std::vector<std::int32_t>>());
    RowShard shard = make_row_shard(context, row, *self);
    const Tensor hidden = decoder.forward(shard.layout, shard.ids);
    const Tensor logits =
        context.memory.empty(Region::loss, DType::f32, {row.tokens(), config.vocabulary});
    head.logits(hidden, logits);
    writer.write(name, logits);
  }
  writer.finish();
}

int run(const std::vector<std::string>& arguments) {
  try {
    if (arguments.size() == 2 && arguments[0] == "students") {
      export_students(arguments[1]);
      return 0;
    }
    if (arguments.size() == 4 && arguments[0] == "logits") {
      write_logits(arguments[1], arguments[2], arguments[3]);
      return 0;
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "interop_models: {}\n", error.what());
    return 1;
  }
  fmt::print(stderr, "interop_models students OUT | logits MODEL DOCUMENTS OUT\n");
  return 2;
}

}  // namespace
}  // namespace bifocal::test

int main(int argc, char** argv) {
  return bifocal::test::run({argv + 1, argv + argc});
}
