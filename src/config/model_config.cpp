// Mixer settings: names, checks, memory, the four presets and per-layer overrides.
#include "config/model_config.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace bifocal {

namespace {

constexpr std::int64_t kSinkTokens = 4;  // of the swa_sink_tokens preset

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(end + 1);
  }
}

std::int64_t parse_count(std::string_view text, std::string_view what, std::string_view override) {
  std::int64_t value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  BIFOCAL_REQUIRE(code == std::errc() && end == text.data() + text.size() && value >= 0,
                  "[mixer] override \"{}\": {} wants a whole number, got \"{}\"",
                  override,
                  what,
                  text);
  return value;
}

// States of `window` 0 and of a full layer have no use for what the preset set for the near branch.
void set_window(MixerSettings& mixer, std::string_view value, std::string_view override) {
  if (value == "full") {
    mixer = MixerSettings{};
    return;
  }
  mixer.window = parse_count(value, "window (a number or \"full\")", override);
  if (mixer.window == 0) {
    mixer.sink = Sink::none;
    mixer.sink_tokens = 0;
  }
}

void set_field(MixerSettings& mixer,
               std::string_view key,
               std::string_view value,
               std::string_view override) {
  if (key == "sink") {
    mixer.sink = parse_sink(value);
    if (mixer.sink != Sink::tokens) {
      mixer.sink_tokens = 0;
    } else if (mixer.sink_tokens == 0) {
      mixer.sink_tokens = kSinkTokens;
    }
  } else if (key == "sink_tokens") {
    mixer.sink_tokens = parse_count(value, key, override);
  } else if (key == "states") {
    mixer.states = parse_states(value);
  } else if (key == "mix") {
    mixer.mix = parse_mix(value);
  } else {
    fail("[mixer] override \"{}\": no key \"{}\": use window, sink, sink_tokens, states or mix",
         override,
         key);
  }
}

// Applies "window=64,sink=learned" to one layer; the window first, since it resets others.
void apply_settings(MixerSettings& mixer, std::string_view settings, std::string_view override) {
  std::vector<std::pair<std::string_view, std::string_view>> fields;
  for (const std::string_view field : split(settings, ',')) {
    const std::size_t equals = field.find('=');
    BIFOCAL_REQUIRE(equals != std::string_view::npos,
                    "[mixer] override \"{}\": wanted key=value, got \"{}\"",
                    override,
                    field);
    fields.emplace_back(field.substr(0, equals), field.substr(equals + 1));
  }
  for (const auto& [key, value] : fields) {
    if (key == "window") {
      set_window(mixer, value, override);
    }
  }
  for (const auto& [key, value] : fields) {
    if (key != "window") {
      set_field(mixer, key, value, override);
    }
  }
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

// Cached tokens that are not window: n pinned tokens, and S * d * d * 4 / (2 * G * d * 2).
double fixed_tokens(const MixerSettings& mixer, const ModelConfig& model) {
  const auto states = static_cast<double>(mixer.num_states(model.heads, model.kv_heads));
  const auto width = static_cast<double>(model.head_dim);
  const double state_bytes = states * width * width * 4.0;
  const double token_bytes = 2.0 * static_cast<double>(model.kv_width()) * 2.0;
  return static_cast<double>(mixer.sink_tokens) + state_bytes / token_bytes;
}

// A preset's settings without its window.
MixerSettings settings_of(std::string_view preset) {
  const auto& names = preset_names();
  BIFOCAL_REQUIRE(std::find(names.begin(), names.end(), preset) != names.end(),
                  "[mixer] no preset \"{}\": use one of {}",
                  preset,
                  join(names));
  MixerSettings mixer;
  if (preset == "swa_sink_tokens") {
    mixer.sink = Sink::tokens;
    mixer.sink_tokens = kSinkTokens;
    return mixer;
  }
  mixer.sink = Sink::learned;
  if (preset == "bifocal") {
    mixer.states = States::kv;
  } else if (preset == "bifocal_query") {
    mixer.states = States::query;
  }
  return mixer;
}

}  // namespace

std::string_view name_of(Family family) {
  switch (family) {
    case Family::qwen3:
      return "qwen3";
    case Family::qwen2:
      return "qwen2";
    case Family::llama:
      return "llama";
  }
  return "unknown";
}

std::string_view name_of(Sink sink) {
  switch (sink) {
    case Sink::none:
      return "none";
    case Sink::learned:
      return "learned";
    case Sink::tokens:
      return "tokens";
  }
  return "unknown";
}

std::string_view name_of(States states) {
  switch (states) {
    case States::none:
      return "none";
    case States::kv:
      return "kv";
    case States::query:
      return "query";
  }
  return "unknown";
}

std::string_view name_of(Mix mix) {
  return mix == Mix::gate ? "gate" : "sum";
}

Sink parse_sink(std::string_view text) {
  for (const Sink sink : {Sink::none, Sink::learned, Sink::tokens}) {
    if (text == name_of(sink)) {
      return sink;
    }
  }
  fail("[mixer] sink: wanted none, learned or tokens, got \"{}\"", text);
}

States parse_states(std::string_view text) {
  for (const States states : {States::none, States::kv, States::query}) {
    if (text == name_of(states)) {
      return states;
    }
  }
  fail("[mixer] states: wanted none, kv or query, got \"{}\"", text);
}

Mix parse_mix(std::string_view text) {
  for (const Mix mix : {Mix::gate, Mix::sum}) {
    if (text == name_of(mix)) {
      return mix;
    }
  }
  fail("[mixer] mix: wanted gate or sum, got \"{}\"", text);
}

void check_mixer(const MixerSettings& mixer, const ModelConfig& model, std::int64_t layer) {
  BIFOCAL_REQUIRE(0 <= layer && layer < model.layers,
                  "[mixer] layer {}: the model has layers 0 to {}",
                  layer,
                  model.layers - 1);
  BIFOCAL_REQUIRE(mixer.window >= 0 || mixer.is_full(),
                  "[mixer] layer {}: window must be full, 0 or more tokens, got {}",
                  layer,
                  mixer.window);
  BIFOCAL_REQUIRE((mixer.sink == Sink::tokens) == (mixer.sink_tokens > 0) && mixer.sink_tokens >= 0,
                  "[mixer] layer {}: sink_tokens is {} with sink = {}: give sink = tokens at least "
                  "one, any other sink none",
                  layer,
                  mixer.sink_tokens,
                  name_of(mixer.sink));
  if (mixer.is_full()) {
    BIFOCAL_REQUIRE(mixer.sink == Sink::none && !mixer.has_far(),
                    "[mixer] layer {}: window = full is the teacher's attention, which has no sink "
                    "and no states: set sink = none and states = none, or a window",
                    layer);
  }
  if (!mixer.has_near()) {
    BIFOCAL_REQUIRE(mixer.has_far(),
                    "[mixer] layer {}: window 0 with states = none reads nothing: set a window or "
                    "states",
                    layer);
    BIFOCAL_REQUIRE(mixer.sink == Sink::none,
                    "[mixer] layer {}: window 0 has no attention that sink = {} could join: set "
                    "sink = none",
                    layer,
                    name_of(mixer.sink));
  }
}

double cached_tokens(const MixerSettings& mixer, const ModelConfig& model) {
  BIFOCAL_REQUIRE(!mixer.is_full(),
                  "[mixer] a full attention layer caches every token of the context: it has no "
                  "bound");
  return static_cast<double>(mixer.window) + fixed_tokens(mixer, model);
}

MixerSettings preset_mixer(std::string_view preset,
                           const ModelConfig& model,
                           std::int64_t budget_tokens) {
  const std::int64_t least = least_budget(preset, model);
  BIFOCAL_REQUIRE(budget_tokens >= least,
                  "[mixer] preset {} does not fit a budget of {} cached tokens per layer: {} of "
                  "them are states and pinned tokens, so the budget must be at least {}",
                  preset,
                  budget_tokens,
                  least - 1,
                  least);
  MixerSettings mixer = settings_of(preset);
  mixer.window = 1 + budget_tokens - least;
  return mixer;
}

std::int64_t least_budget(std::string_view preset, const ModelConfig& model) {
  // S * d / G is whole for one state per key-value head and for one per query head.
  return 1 + static_cast<std::int64_t>(fixed_tokens(settings_of(preset), model));
}

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names{
      "swa_learned_sink", "swa_sink_tokens", "bifocal", "bifocal_query"};
  return names;
}

std::vector<MixerSettings> make_mixers(std::string_view preset,
                                       std::int64_t budget_tokens,
                                       const std::vector<std::string>& overrides,
                                       const ModelConfig& model) {
  std::vector<MixerSettings> mixers = model.mixers;
  if (preset != kKeepPreset) {
    mixers.assign(static_cast<std::size_t>(model.layers),
                  preset_mixer(preset, model, budget_tokens));
  }
  for (const std::string& text : overrides) {
    const std::size_t colon = text.find(':');
    BIFOCAL_REQUIRE(colon != std::string::npos,
                    "[mixer] override \"{}\": wanted \"3:window=full\" or "
                    "\"4-7:window=64,states=query\"",
                    text);
    const std::vector<std::string_view> range = split(std::string_view(text).substr(0, colon), '-');
    BIFOCAL_REQUIRE(range.size() <= 2, "[mixer] override \"{}\": wanted layers as 4 or 4-7", text);
    const std::int64_t first = parse_count(range.front(), "the first layer", text);
    const std::int64_t last = parse_count(range.back(), "the last layer", text);
    BIFOCAL_REQUIRE(first <= last && last < model.layers,
                    "[mixer] override \"{}\": the model has layers 0 to {}",
                    text,
                    model.layers - 1);
    for (std::int64_t layer = first; layer <= last; ++layer) {
      apply_settings(
          mixers[static_cast<std::size_t>(layer)], std::string_view(text).substr(colon + 1), text);
    }
  }
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    check_mixer(mixers[static_cast<std::size_t>(layer)], model, layer);
  }
  return mixers;
}

std::string describe(const MixerSettings& mixer) {
  if (mixer.is_full()) {
    return "full attention";
  }
  std::string text = mixer.has_near() ? fmt::format("window {}", mixer.window) : "no window";
  if (mixer.sink == Sink::learned) {
    text += ", learned sink";
  } else if (mixer.sink == Sink::tokens) {
    text += fmt::format(", {} sink tokens", mixer.sink_tokens);
  }
  if (mixer.has_far()) {
    text += mixer.states == States::kv ? ", states per key-value head" : ", states per query head";
  }
  if (mixer.has_near() && mixer.has_far()) {
    text += fmt::format(", {}", name_of(mixer.mix));
  }
  return text;
}

}  // namespace bifocal
