// Tiny models with seeded weights and packed rows, the same on any number of ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data/row.h"
#include "distill/stage.h"
#include "model/decoder.h"
#include "parallel/backend.h"
#include "parallel/mesh.h"

namespace bifocal::test {

// What a model computes with: the CPU, or a backend. Outlives every tensor and model made from it.
class Device {
 public:
  explicit Device(DType dtype) : dtype_(dtype), own_(make_cpu_backend(0)), backend_(own_.get()) {}

  Device(DType dtype, Backend& backend) : dtype_(dtype), backend_(&backend) {}

  Context context() { return {backend_->stream(), backend_->memory(), dtype_}; }

 private:
  DType dtype_;
  std::unique_ptr<Backend> own_;
  Backend* backend_;
};

// A teacher of three layers with two query heads per key-value head. qwen3: q/k norms, tied; qwen2:
// biases, untied; llama: rope scaling, untied.
ModelConfig tiny_teacher(Family family = Family::qwen3, std::int64_t kv_heads = 2);

// The teacher's shape with these mixers in place of full attention.
ModelConfig tiny_student(ModelConfig teacher, std::vector<MixerSettings> mixers);

// A named student and its mixers: the four presets, and two that mix kinds of layers (full and
// windowed, gate and sum, near or far branch alone, learned sinks and pinned tokens).
struct NamedMixers {
  std::string name;
  std::vector<MixerSettings> mixers;
};

std::vector<NamedMixers> tiny_students(const ModelConfig& teacher);

// A config with weights drawn by (seed, parameter name, element).
class TinyModel {
 public:
  TinyModel(Context context,
            const ModelConfig& config,
            Communicator& group,
            Weights::Placement placement = Weights::Placement::replicated,
            std::uint64_t seed = 1);
  ~TinyModel() = default;
  TinyModel(const TinyModel&) = delete;
  TinyModel& operator=(const TinyModel&) = delete;
  TinyModel(TinyModel&&) = delete;
  TinyModel& operator=(TinyModel&&) = delete;

  const ModelConfig& config() const { return config_; }

  const ParameterTable& table() const { return table_; }

  Weights& weights() { return weights_; }

  Decoder& decoder() { return decoder_; }

  // Adds to, or replaces, every element of a parameter: value(old, element). Collective.
  void change(const std::string& name, const std::function<double(double, std::int64_t)>& value);

 private:
  Context context_;
  ModelConfig config_;
  ParameterTable table_;
  Weights weights_;
  Decoder decoder_;
};

// Parameters or gradients by name, whole.
using NamedValues = std::map<std::string, std::vector<double>>;

// Every parameter. Collective over the weights' group. Without a context: weights on the host.
NamedValues whole_weights(Context context, Weights& weights);
NamedValues whole_weights(Weights& weights);

// Every parameter's gradient, times its unit's factor. Collective over `group`, the gradients' own.
// Without a context: gradients on the host.
NamedValues whole_gradients(Context context,
                            const ParameterTable& table,
                            const Gradients& gradients,
                            Communicator& group,
                            const std::vector<double>& unit_factors);
NamedValues whole_gradients(const ParameterTable& table,
                            const Gradients& gradients,
                            Communicator& group,
                            const std::vector<double>& unit_factors);

// Sum of squares of every unit's gradient. Collective over `group`, the gradients' own.
std::vector<double> sums_of_squares(const Gradients& gradients,
                                    std::int64_t units,
                                    Communicator& group);

// The largest absolute value.
double largest(const NamedValues& values);

// A row of documents of these lengths; every token with a successor is kept, ids are drawn from the
// seed.
Row packed_row(const std::vector<std::int64_t>& lengths,
               std::int64_t vocabulary,
               std::uint64_t seed);

// Row `position` of an endless seeded set: uneven documents (some of one token) drawn by position,
// padding at the end of some rows, and a keep mask with gaps. masked(position, token) drops further
// tokens from the mask.
using Masked = std::function<bool(std::int64_t position, std::int64_t token)>;
Row random_row(std::int64_t position,
               std::int64_t tokens,
               std::int64_t vocabulary,
               const Masked& masked = {});

// Stages over rows of `row`.
StageRows stage_rows(std::function<Row(std::int64_t)> row,
                     std::int64_t per_step,
                     std::int64_t steps);

// Every data x sequence arrangement of `ranks` ranks.
std::vector<MeshCounts> meshes_of(int ranks);

}  // namespace bifocal::test
