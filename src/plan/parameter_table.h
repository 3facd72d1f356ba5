// Every parameter of a model, and how flat units of parameters are cut over ranks.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "config/model_config.h"
#include "core/tensor.h"

namespace bifocal {

// How a new tensor starts (spec: start values); `copied` ones come from the teacher.
enum class Start : std::uint8_t { copied, zero, identity, sink, forget_bias, output_bias };

struct Parameter {
  std::string name;  // Hugging Face name, model.layers.N.mixer.* for new tensors
  Shape shape;
  std::int64_t unit = 0;
  std::int64_t offset = 0;  // first element inside the unit's flat buffer
  Start start = Start::copied;
  bool decays = false;    // copied matrices, embedding and head
  bool in_mixer = false;  // q, k, v with norms and biases: what align's trainable = "mixer" adds

  bool is_new() const { return start != Start::copied; }

  std::int64_t size() const { return shape.size(); }
};

// A flat buffer that is gathered, reduced and updated as one: the embedding, each layer, the final
// norm with an untied head.
struct Unit {
  std::string name;
  std::int64_t begin = 0, end = 0;  // parameters [begin, end) of the table
  // Elements of the flat buffer. Gaps between parameters (offsets are multiples of 16) count, the
  // padding of the last rank's part does not.
  std::int64_t size = 0;
};

class ParameterTable {
 public:
  explicit ParameterTable(const ModelConfig& model);

  const std::vector<Parameter>& parameters() const { return parameters_; }

  const std::vector<Unit>& units() const { return units_; }

  std::int64_t embedding_unit() const { return 0; }

  std::int64_t layer_unit(std::int64_t layer) const { return 1 + layer; }

  std::int64_t final_unit() const { return static_cast<std::int64_t>(units_.size()) - 1; }

  // Throws Error when there is no such parameter.
  const Parameter& at(const std::string& name) const;
  bool contains(const std::string& name) const;

  // Elements of all parameters, padding not counted.
  std::int64_t total() const;

 private:
  void add(Parameter parameter);
  std::vector<Parameter> parameters_;
  std::vector<Unit> units_;
  std::unordered_map<std::string, std::size_t> index_;
};

// Elements of one of `ranks` equal parts of a unit, a multiple of 16; the last part is padded.
std::int64_t part_size(std::int64_t unit_size, std::int64_t ranks);

}  // namespace bifocal
