// What a model is: its shape, its rope, and the mixer settings of every layer.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/rope_scaling.h"

namespace bifocal {

enum class Family : std::uint8_t { qwen3, qwen2, llama };

enum class Sink : std::uint8_t { none, learned, tokens };

enum class States : std::uint8_t { none, kv, query };

enum class Mix : std::uint8_t { gate, sum };

// Settings of one layer's mixer (docs/bifocal_layer.md). window counts the token itself; 0 means no
// near branch, kFullWindow the teacher's causal attention.
struct MixerSettings {
  static constexpr std::int64_t kFullWindow = -1;

  std::int64_t window = kFullWindow;
  Sink sink = Sink::none;
  std::int64_t sink_tokens = 0;
  States states = States::none;
  Mix mix = Mix::gate;

  bool is_full() const { return window == kFullWindow; }

  bool has_near() const { return window != 0; }

  bool has_far() const { return states != States::none; }

  // Whether the layer has gate tensors.
  bool has_gate() const { return has_near() && has_far() && mix == Mix::gate; }

  std::int64_t num_states(std::int64_t heads, std::int64_t kv_heads) const {
    return states == States::none ? 0 : (states == States::kv ? kv_heads : heads);
  }

  bool operator==(const MixerSettings&) const = default;
};

struct ModelConfig {
  Family family = Family::qwen3;
  std::int64_t vocabulary = 0;
  std::int64_t hidden = 0;        // D
  std::int64_t intermediate = 0;  // MLP width
  std::int64_t layers = 0;
  std::int64_t heads = 0;     // H, query heads
  std::int64_t kv_heads = 0;  // G
  std::int64_t head_dim = 0;  // d
  double norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool qk_norm = false;   // per-head RMSNorm of queries and keys (Qwen3)
  bool qkv_bias = false;  // biases on q, k, v (Qwen2, Qwen2.5)
  bool tied = true;       // the head is the embedding
  std::int64_t max_position = 0;
  std::vector<MixerSettings> mixers;  // [layers]; full everywhere for a teacher
  // The base model's config.json as it was read, which `export` writes back with the mixers added.
  std::string source_json;

  // H * d, which may differ from hidden.
  std::int64_t attention_width() const { return heads * head_dim; }

  std::int64_t kv_width() const { return kv_heads * head_dim; }
};

std::string_view name_of(Family family);
std::string_view name_of(Sink sink);
std::string_view name_of(States states);
std::string_view name_of(Mix mix);
// Throw Error naming the allowed words.
Sink parse_sink(std::string_view text);
States parse_states(std::string_view text);
Mix parse_mix(std::string_view text);

// Throws Error when the settings contradict each other or the model ("[mixer] layer 3: ...").
void check_mixer(const MixerSettings& mixer, const ModelConfig& model, std::int64_t layer);

// Memory of one layer's cache, counted in bf16 cached tokens: window + sink tokens + states * d * d
// * 4 / (2 * G * d * 2); a full layer has no bound and is an Error.
double cached_tokens(const MixerSettings& mixer, const ModelConfig& model);

// The four presets at a memory budget in cached tokens per layer: swa_learned_sink,
// swa_sink_tokens, bifocal, bifocal_query. The window is what the budget leaves. Throws Error when
// the budget cannot hold the preset, saying how much it needs, and for an unknown name, listing the
// known ones.
MixerSettings preset_mixer(std::string_view preset,
                           const ModelConfig& model,
                           std::int64_t budget_tokens);

const std::vector<std::string>& preset_names();

// The smallest budget that holds the preset, with a window of one token. Throws Error for an
// unknown name.
std::int64_t least_budget(std::string_view preset, const ModelConfig& model);

// In place of a preset: the mixers that the model already has (a teacher's full attention, a
// student's own).
inline constexpr std::string_view kKeepPreset = "keep";

// A mixer per layer from a preset (or kKeepPreset) and overrides such as "3:window=full" or
// "4-7:window=64,sink=learned,states=query" (keys window, sink, sink_tokens, states, mix; layers
// from 0). window=full starts the layer from scratch, window=0 drops the sink, sink=tokens pins 4
// unless sink_tokens says otherwise. Every result passes check_mixer.
std::vector<MixerSettings> make_mixers(std::string_view preset,
                                       std::int64_t budget_tokens,
                                       const std::vector<std::string>& overrides,
                                       const ModelConfig& model);

// "window 448, learned sink, states per key-value head, gate"
std::string describe(const MixerSettings& mixer);

}  // namespace bifocal
