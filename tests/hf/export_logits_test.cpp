// A student that is exported and read again gives the same logits, bit for bit.
#include <gtest/gtest.h>

#include "hf/export.h"
#include "hf/hf_config.h"
#include "hf/model_tensors.h"
#include "hf/safetensors.h"
#include "model/head.h"
#include "model/row_shard.h"
#include "support/compare.h"
#include "support/fill_weights.h"
#include "support/temporary_directory.h"
#include "support/tiny_model.h"

namespace bifocal::test {
namespace {

Tensor logits_of(Context context, TinyModel& model, Communicator& self) {
  const Row row = packed_row({40, 1, 23}, model.config().vocabulary, 3);
  RowShard shard = make_row_shard(context, row, self);
  const Tensor hidden = model.decoder().forward(shard.layout, shard.ids);
  Tensor logits =
      context.memory.empty(Region::loss, context.dtype, {row.tokens(), model.config().vocabulary});
  Head(context, model.config(), model.weights()).logits(hidden, logits);
  return logits;
}

TEST(ExportLogits, AreThoseOfTheModelThatWasExported) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    const ModelConfig teacher = tiny_teacher(family);
    for (const NamedMixers& student : tiny_students(teacher)) {
      Device device(DType::f32);
      const Context context = device.context();
      const std::unique_ptr<Communicator> self = make_self_communicator();
      TinyModel model(context, tiny_student(teacher, student.mixers), *self);
      const TemporaryDirectory directory;
      const std::string output = directory.path("exported");
      ExportOptions options;
      options.model = model.config();
      options.teacher = directory.path();
      options.tokenizer = directory.path();
      options.output = output;
      options.dtype = DType::f32;
      options.origin = "a test";
      options.commit = "none";
      export_model(options, [&](const Parameter& parameter) {
        return parameter_view(parameter, model.weights().acquire(parameter.unit));
      });

      const ModelConfig read = read_hf_config(output);
      EXPECT_EQ(read.mixers, model.config().mixers) << student.name;
      TinyModel again(context, read, *self, Weights::Placement::replicated, 2);
      const SafetensorsReader reader(output);
      check_model_tensors(reader, again.table());
      fill_weights(context,
                   again.weights(),
                   [&](const Parameter& p, std::int64_t begin, const TensorView& piece) {
                     reader.read(p.name, begin, piece);
                   });
      EXPECT_SAME_BITS(logits_of(context, again, *self), logits_of(context, model, *self));
    }
  }
}

}  // namespace
}  // namespace bifocal::test
