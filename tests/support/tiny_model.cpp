// Seeded weights, rows and meshes.
#include "support/tiny_model.h"

#include <algorithm>
#include <cmath>

#include "core/random.h"
#include "ops/elementwise.h"
#include "support/device_values.h"
#include "support/fill_weights.h"

namespace bifocal::test {

namespace {

constexpr std::uint64_t kRowSeed = 20;

// Values that exercise every term: norms near one, forget gates that keep a few tokens to hundreds.
double start_of(const Parameter& parameter, double normal, std::int64_t element) {
  const std::string& name = parameter.name;
  if (name.find("norm") != std::string::npos) {
    return 1.0 + 0.2 * normal;
  }
  if (name.ends_with("f_gate.bias")) {
    return 2.0 + normal;
  }
  if (name.ends_with("o_gate.bias")) {
    return 0.5 * normal;
  }
  if (name.ends_with(".bias")) {
    return 0.3 * normal;
  }
  if (name.ends_with("sink")) {
    return normal;
  }
  if (parameter.start == Start::identity) {
    const std::int64_t width = parameter.shape[2];
    const bool diagonal = element / width % width == element % width;
    return (diagonal ? 1.0 : 0.0) + 0.3 * normal;
  }
  const bool is_vocabulary = name == "model.embed_tokens.weight" || name == "lm_head.weight";
  return (is_vocabulary ? 0.4 : 1.0 / std::sqrt(static_cast<double>(parameter.shape[1]))) * normal;
}

}  // namespace

ModelConfig tiny_teacher(Family family, std::int64_t kv_heads) {
  ModelConfig config;
  config.family = family;
  config.vocabulary = 53;
  config.hidden = 24;
  config.intermediate = 40;
  config.layers = 3;
  config.kv_heads = kv_heads;
  config.heads = 2 * kv_heads;
  config.head_dim = 8;
  config.qk_norm = family == Family::qwen3;
  config.qkv_bias = family == Family::qwen2;
  config.tied = family == Family::qwen3;
  config.max_position = 1024;
  if (family == Family::llama) {
    config.norm_eps = 1e-5;
    config.rope_scaling = {.factor = 8.0, .original_max_position = 64.0};
  }
  config.mixers.assign(static_cast<std::size_t>(config.layers), MixerSettings{});
  return config;
}

ModelConfig tiny_student(ModelConfig teacher, std::vector<MixerSettings> mixers) {
  teacher.mixers = std::move(mixers);
  for (std::int64_t layer = 0; layer < teacher.layers; ++layer) {
    check_mixer(teacher.mixers.at(static_cast<std::size_t>(layer)), teacher, layer);
  }
  return teacher;
}

std::vector<NamedMixers> tiny_students(const ModelConfig& teacher) {
  std::vector<NamedMixers> students;
  // Four more tokens than the states of bifocal_query, the largest, take.
  const std::int64_t budget = least_budget("bifocal_query", teacher) + 3;
  for (const std::string& preset : preset_names()) {
    students.push_back({preset, make_mixers(preset, budget, {}, teacher)});
  }
  const MixerSettings full;
  const MixerSettings pinned_sum{
      .window = 3, .sink = Sink::tokens, .sink_tokens = 5, .states = States::kv, .mix = Mix::sum};
  const MixerSettings far_alone{.window = 0, .states = States::query};
  const MixerSettings pinned_gate{
      .window = 2, .sink = Sink::tokens, .sink_tokens = 4, .states = States::query};
  const MixerSettings near_alone{.window = 1};
  students.push_back(
      {"mixed: full, pinned + states summed, states alone", {full, pinned_sum, far_alone}});
  students.push_back(
      {"mixed: pinned and states gated, full, window alone", {pinned_gate, full, near_alone}});
  return students;
}

TinyModel::TinyModel(Context context,
                     const ModelConfig& config,
                     Communicator& group,
                     Weights::Placement placement,
                     std::uint64_t seed)
    : context_(context),
      config_(config),
      table_(config),
      weights_(context, table_, group, {placement, context.dtype, Region::weights}),
      decoder_(context, config_, weights_) {
  fill_weights(context_,
               weights_,
               [&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
                 std::vector<double> values(static_cast<std::size_t>(piece.size()));
                 for (std::int64_t i = 0; i < piece.size(); ++i) {
                   const double normal = random_normal(
                       seed, stream_of(parameter.name), static_cast<std::uint64_t>(first + i));
                   values[static_cast<std::size_t>(i)] = start_of(parameter, normal, first + i);
                 }
                 CpuStream cpu;
                 run(cpu, Cast{.y = piece, .x = {values.data(), DType::f64, piece.shape}});
               });
  weights_.share();
}

void TinyModel::change(const std::string& name,
                       const std::function<double(double, std::int64_t)>& value) {
  BIFOCAL_ASSERT(table_.contains(name));
  fill_weights(context_,
               weights_,
               [&](const Parameter& parameter, std::int64_t first, const TensorView& piece) {
                 if (parameter.name != name) {
                   return;
                 }
                 dispatch_real("tiny_model", piece.dtype, [&]<class T>(T) {
                   T* elements = piece.as<T>();
                   for (std::int64_t i = 0; i < piece.size(); ++i) {
                     elements[i] =
                         static_cast<T>(value(static_cast<double>(elements[i]), first + i));
                   }
                 });
               });
  weights_.share();
}

namespace {

void add_unit(const ParameterTable& table,
              std::size_t unit,
              const std::vector<double>& flat,
              double factor,
              NamedValues& values) {
  const Unit& range = table.units()[unit];
  for (std::int64_t p = range.begin; p < range.end; ++p) {
    const Parameter& parameter = table.parameters()[static_cast<std::size_t>(p)];
    std::vector<double>& whole = values[parameter.name];
    for (std::int64_t i = 0; i < parameter.size(); ++i) {
      whole.push_back(flat[static_cast<std::size_t>(parameter.offset + i)] * factor);
    }
  }
}

}  // namespace

NamedValues whole_weights(Context context, Weights& weights) {
  NamedValues values;
  for (std::size_t unit = 0; unit < weights.table().units().size(); ++unit) {
    const auto index = static_cast<std::int64_t>(unit);
    add_unit(weights.table(), unit, values_of(context, weights.acquire(index)), 1.0, values);
    weights.release(index);
  }
  return values;
}

NamedValues whole_weights(Weights& weights) {
  Device host(DType::f32);
  return whole_weights(host.context(), weights);
}

NamedValues whole_gradients(Context context,
                            const ParameterTable& table,
                            const Gradients& gradients,
                            Communicator& group,
                            const std::vector<double>& unit_factors) {
  NamedValues values;
  for (std::size_t unit = 0; unit < table.units().size(); ++unit) {
    const TensorView part = gradients.part(static_cast<std::int64_t>(unit));
    const Tensor whole =
        context.memory.empty(Region::communication, part.dtype, {part.size() * group.size()});
    group.all_gather(whole, part);
    add_unit(table, unit, values_of(context, whole), unit_factors[unit], values);
  }
  return values;
}

NamedValues whole_gradients(const ParameterTable& table,
                            const Gradients& gradients,
                            Communicator& group,
                            const std::vector<double>& unit_factors) {
  Device host(DType::f32);
  return whole_gradients(host.context(), table, gradients, group, unit_factors);
}

std::vector<double> sums_of_squares(const Gradients& gradients,
                                    std::int64_t units,
                                    Communicator& group) {
  std::vector<double> sums(static_cast<std::size_t>(units), 0.0);
  const TensorView view{sums.data(), DType::f64, {units}};
  gradients.add_sums_of_squares(view);
  group.all_reduce_sum(view);
  return sums;
}

double largest(const NamedValues& values) {
  double result = 0.0;
  for (const auto& [name, whole] : values) {
    for (const double value : whole) {
      result = std::max(result, std::abs(value));
    }
  }
  return result;
}

Row packed_row(const std::vector<std::int64_t>& lengths,
               std::int64_t vocabulary,
               std::uint64_t seed) {
  Row row;
  for (const std::int64_t length : lengths) {
    const auto start = static_cast<std::int32_t>(row.ids.size());
    for (std::int64_t i = 0; i < length; ++i) {
      row.ids.push_back(static_cast<std::int32_t>(
          random_below(static_cast<std::uint64_t>(vocabulary), seed, 0, row.ids.size())));
      row.start.push_back(start);
    }
  }
  for (std::size_t token = 0; token < row.ids.size(); ++token) {
    const bool last = token + 1 == row.ids.size() || row.start[token + 1] != row.start[token];
    row.next.push_back(last ? -1 : row.ids[token + 1]);
    row.keep.push_back(last ? 0 : 1);
  }
  return row;
}

Row random_row(std::int64_t position,
               std::int64_t tokens,
               std::int64_t vocabulary,
               const Masked& masked) {
  const auto draw = [&](std::uint64_t bound, std::uint64_t stream, std::uint64_t index) {
    const auto at = static_cast<std::uint64_t>(position) * 4096 + index;
    return static_cast<std::int64_t>(random_below(bound, kRowSeed, stream, at));
  };
  const std::int64_t padding = draw(3, 1, 0) == 0 ? std::min<std::int64_t>(tokens / 4, 5) : 0;
  std::vector<std::int64_t> lengths;
  for (std::int64_t left = tokens - padding; left > 0; left -= lengths.back()) {
    const std::uint64_t documents = lengths.size();
    // A third are short, some of one token; the others may span most of the row.
    const bool is_short = draw(3, 2, documents) == 0;
    const auto bound = static_cast<std::uint64_t>(is_short ? 4 : tokens);
    lengths.push_back(std::min(left, 1 + draw(bound, 3, documents)));
  }
  if (padding > 0) {
    lengths.push_back(padding);
  }
  Row row = packed_row(lengths, vocabulary, kRowSeed + 1 + static_cast<std::uint64_t>(position));
  row.padding = padding;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const auto index = static_cast<std::size_t>(token);
    const bool is_padding = token >= tokens - padding;
    const bool dropped = is_padding || (masked && masked(position, token));
    row.keep[index] = !dropped && draw(5, 4, index) != 0 ? 1 : 0;
    if (is_padding) {
      row.next[index] = -1;
    }
  }
  return row;
}

StageRows stage_rows(std::function<Row(std::int64_t)> row,
                     std::int64_t per_step,
                     std::int64_t steps) {
  return {.row = std::move(row), .first = 0, .per_step = per_step, .steps = steps};
}

std::vector<MeshCounts> meshes_of(int ranks) {
  std::vector<MeshCounts> meshes;
  for (std::int64_t sequence = 1; sequence <= ranks; ++sequence) {
    if (ranks % sequence == 0) {
      meshes.push_back({.data = ranks / sequence, .sequence = sequence});
    }
  }
  return meshes;
}

}  // namespace bifocal::test
