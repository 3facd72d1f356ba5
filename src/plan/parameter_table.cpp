// Every parameter of a model, unit by unit.
#include "plan/parameter_table.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

// Elements that a parameter's offset and a rank's part are multiples of: one cache line of float32.
constexpr std::int64_t kAlignment = 16;

std::int64_t align(std::int64_t elements) {
  return (elements + kAlignment - 1) / kAlignment * kAlignment;
}

Parameter copied(std::string name, const Shape& shape) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = shape;
  parameter.decays = shape.rank() == 2;
  return parameter;
}

Parameter in_mixer(std::string name, const Shape& shape) {
  Parameter parameter = copied(std::move(name), shape);
  parameter.in_mixer = true;
  return parameter;
}

Parameter fresh(std::string name, const Shape& shape, Start start) {
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = shape;
  parameter.start = start;
  return parameter;
}

std::vector<Parameter> attention_parameters(const ModelConfig& model, const std::string& layer) {
  const std::string attention = layer + "self_attn.";
  const std::pair<const char*, std::int64_t> projections[] = {{"q_proj", model.attention_width()},
                                                              {"k_proj", model.kv_width()},
                                                              {"v_proj", model.kv_width()}};
  std::vector<Parameter> all;
  for (const auto& [name, width] : projections) {
    all.push_back(in_mixer(attention + name + ".weight", {width, model.hidden}));
    if (model.qkv_bias) {
      all.push_back(in_mixer(attention + name + ".bias", {width}));
    }
  }
  if (model.qk_norm) {
    all.push_back(in_mixer(attention + "q_norm.weight", {model.head_dim}));
    all.push_back(in_mixer(attention + "k_norm.weight", {model.head_dim}));
  }
  all.push_back(copied(attention + "o_proj.weight", {model.hidden, model.attention_width()}));
  return all;
}

std::vector<Parameter> new_parameters(const ModelConfig& model,
                                      const MixerSettings& mixer,
                                      const std::string& layer) {
  const std::string prefix = layer + "mixer.";
  const std::int64_t heads = model.heads;
  const std::int64_t width = model.head_dim;
  const std::int64_t states = mixer.num_states(heads, model.kv_heads);
  std::vector<Parameter> all;
  if (mixer.sink == Sink::learned && mixer.has_near()) {
    all.push_back(fresh(prefix + "sink", {heads}, Start::sink));
  }
  if (mixer.has_far()) {
    all.push_back(fresh(prefix + "feature_q", {heads, width, width}, Start::identity));
    all.push_back(fresh(prefix + "feature_k", {states, width, width}, Start::identity));
    all.push_back(fresh(prefix + "i_gate.weight", {states, model.hidden}, Start::zero));
    all.push_back(fresh(prefix + "f_gate.weight", {states, model.hidden}, Start::zero));
    all.push_back(fresh(prefix + "f_gate.bias", {states}, Start::forget_bias));
  }
  if (mixer.has_gate()) {
    all.push_back(fresh(prefix + "o_gate.weight", {heads, model.hidden}, Start::zero));
    all.push_back(fresh(prefix + "o_gate.bias", {heads}, Start::output_bias));
  }
  return all;
}

}  // namespace

ParameterTable::ParameterTable(const ModelConfig& model) {
  BIFOCAL_REQUIRE(static_cast<std::int64_t>(model.mixers.size()) == model.layers,
                  "[parameter_table] wanted a mixer for each of {} layers, got {}",
                  model.layers,
                  model.mixers.size());
  const auto begin_unit = [this](std::string name) {
    const auto here = static_cast<std::int64_t>(parameters_.size());
    units_.push_back({.name = std::move(name), .begin = here, .end = here, .size = 0});
  };

  begin_unit("embedding");
  add(copied("model.embed_tokens.weight", {model.vocabulary, model.hidden}));

  for (std::int64_t number = 0; number < model.layers; ++number) {
    begin_unit(fmt::format("layer {}", number));
    const std::string layer = fmt::format("model.layers.{}.", number);
    add(copied(layer + "input_layernorm.weight", {model.hidden}));
    for (Parameter& parameter : attention_parameters(model, layer)) {
      add(std::move(parameter));
    }
    const MixerSettings& mixer = model.mixers[static_cast<std::size_t>(number)];
    for (Parameter& parameter : new_parameters(model, mixer, layer)) {
      add(std::move(parameter));
    }
    add(copied(layer + "post_attention_layernorm.weight", {model.hidden}));
    add(copied(layer + "mlp.gate_proj.weight", {model.intermediate, model.hidden}));
    add(copied(layer + "mlp.up_proj.weight", {model.intermediate, model.hidden}));
    add(copied(layer + "mlp.down_proj.weight", {model.hidden, model.intermediate}));
  }

  begin_unit("final");
  add(copied("model.norm.weight", {model.hidden}));
  if (!model.tied) {
    add(copied("lm_head.weight", {model.vocabulary, model.hidden}));
  }
}

void ParameterTable::add(Parameter parameter) {
  Unit& unit = units_.back();
  parameter.unit = static_cast<std::int64_t>(units_.size()) - 1;
  parameter.offset = align(unit.size);
  unit.size = parameter.offset + parameter.size();
  index_.emplace(parameter.name, parameters_.size());
  parameters_.push_back(std::move(parameter));
  unit.end = static_cast<std::int64_t>(parameters_.size());
}

const Parameter& ParameterTable::at(const std::string& name) const {
  const auto found = index_.find(name);
  BIFOCAL_REQUIRE(
      found != index_.end(), "[parameter_table] the model has no parameter \"{}\"", name);
  return parameters_[found->second];
}

bool ParameterTable::contains(const std::string& name) const {
  return index_.contains(name);
}

std::int64_t ParameterTable::total() const {
  std::int64_t elements = 0;
  for (const Parameter& parameter : parameters_) {
    elements += parameter.size();
  }
  return elements;
}

std::int64_t part_size(std::int64_t unit_size, std::int64_t ranks) {
  return align((unit_size + ranks - 1) / ranks);
}

}  // namespace bifocal
