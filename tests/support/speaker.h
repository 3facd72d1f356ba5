// Models of every kind with seeded weights, and what tests of generation ask of them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "generate/generator.h"
#include "model/head.h"
#include "model/row_shard.h"
#include "support/tiny_model.h"

namespace bifocal::test {

inline constexpr std::int64_t kVocabulary = 53;

inline std::vector<ModelConfig> all_models() {
  std::vector<ModelConfig> models;
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    const ModelConfig teacher = tiny_teacher(family);
    models.push_back(teacher);
    for (const NamedMixers& student : tiny_students(teacher)) {
      models.push_back(tiny_student(teacher, student.mixers));
    }
  }
  return models;
}

inline std::vector<std::int32_t> random_ids(std::int64_t count, std::uint64_t seed) {
  return packed_row({count}, kVocabulary, seed).ids;
}

inline std::string describe_all(const ModelConfig& config) {
  return fmt::format("{}: {}; {}; {}",
                     name_of(config.family),
                     describe(config.mixers[0]),
                     describe(config.mixers[1]),
                     describe(config.mixers[2]));
}

// A model with what a test asks of it.
class Speaker {
 public:
  explicit Speaker(const ModelConfig& config, DType dtype = DType::f64)
      : device_(dtype), model_(device_.context(), config, *self_) {}

  Context context() { return device_.context(); }

  TinyModel& model() { return model_; }

  Generator generator(std::int64_t batch) { return {context(), model_.decoder(), batch}; }

  // Logits [tokens, vocabulary] of a sequence by the forward pass.
  Tensor forward(const std::vector<std::int32_t>& ids) {
    Row row = packed_row({static_cast<std::int64_t>(ids.size())}, kVocabulary, 1);
    row.ids = ids;
    RowShard shard = make_row_shard(context(), row, *self_);
    const Tensor hidden = model_.decoder().forward(shard.layout, shard.ids);
    Tensor logits =
        context().memory.empty(Region::loss, context().dtype, {row.tokens(), kVocabulary});
    Head(context(), model_.config(), model_.weights()).logits(hidden, logits);
    return logits;
  }

 private:
  Device device_;
  std::unique_ptr<Communicator> self_ = make_self_communicator();
  TinyModel model_;
};

inline ConstTensorView feed_one(Generator& generator, std::int64_t slot, std::int32_t id) {
  return generator.feed(std::span(&slot, 1), std::span(&id, 1));
}

}  // namespace bifocal::test
