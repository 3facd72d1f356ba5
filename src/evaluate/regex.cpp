// Searching with PCRE2.
#include "evaluate/regex.h"

#include <algorithm>
#include <array>
#include <limits>
#include <pcre2.h>

#include "core/error.h"

namespace bifocal {

namespace {

// Steps of one search: a constant for short texts and a share per byte for long ones.
constexpr std::size_t kSteps = 5'000'000;
constexpr std::size_t kStepsPerByte = 500;
constexpr std::uint32_t kHeapKib = 256 * 1024;

template <auto Free>
struct Deleter {
  template <class T>
  void operator()(T* thing) const {
    Free(thing);
  }
};

using Code = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;

std::string message_of(int code) {
  std::array<unsigned char, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data() == nullptr ? "" : text.data());
}

RegexMatch groups_of(std::string_view text, const MatchData& data) {
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data.get());
  RegexMatch groups(pcre2_get_ovector_count(data.get()));
  for (std::size_t g = 0; g < groups.size(); ++g) {
    if (offsets[2 * g] != PCRE2_UNSET) {
      groups[g] = text.substr(offsets[2 * g], offsets[2 * g + 1] - offsets[2 * g]);
    }
  }
  return groups;
}

}  // namespace

struct Regex::State {
  std::string pattern;
  Code code;

  MatchContext bounded(std::size_t text_bytes) const {
    MatchContext context(pcre2_match_context_create(nullptr));
    BIFOCAL_REQUIRE(context != nullptr, "[regex] out of memory");
    const std::size_t steps = kSteps + kStepsPerByte * text_bytes;
    pcre2_set_match_limit(context.get(),
                          static_cast<std::uint32_t>(std::min<std::size_t>(
                              steps, std::numeric_limits<std::uint32_t>::max())));
    pcre2_set_heap_limit(context.get(), kHeapKib);
    return context;
  }
};

Regex::Regex(std::string_view pattern) : state_(std::make_unique<State>()) {
  state_->pattern = pattern;
  const CompileContext context(pcre2_compile_context_create(nullptr));
  BIFOCAL_REQUIRE(context != nullptr, "[regex] out of memory");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE place = 0;
  state_->code.reset(
      pcre2_compile(bytes_of(pattern), pattern.size(), 0, &error, &place, context.get()));
  BIFOCAL_REQUIRE(state_->code != nullptr,
                  "[regex] wanted a regular expression, got '{}': {} at byte {}",
                  pattern,
                  message_of(error),
                  place);
}

Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

void Regex::for_each(std::string_view text,
                     const std::function<bool(const RegexMatch& match)>& visit) const {
  const MatchContext context = state_->bounded(text.size());
  const MatchData data(pcre2_match_data_create_from_pattern(state_->code.get(), nullptr));
  BIFOCAL_REQUIRE(data != nullptr, "[regex] out of memory");
  std::size_t start = 0;
  bool after_empty = false;  // an empty match stands at start: the next one must not be it again
  while (start <= text.size()) {
    const std::uint32_t options = after_empty ? PCRE2_NOTEMPTY_ATSTART | PCRE2_ANCHORED : 0U;
    const int found = pcre2_match(
        state_->code.get(), bytes_of(text), text.size(), start, options, data.get(), context.get());
    if (found == PCRE2_ERROR_NOMATCH) {
      if (!after_empty) {
        return;
      }
      ++start;
      after_empty = false;
      continue;
    }
    BIFOCAL_REQUIRE(found > 0,
                    "[regex] searching {} bytes for '{}' failed: {}",
                    text.size(),
                    state_->pattern,
                    message_of(found));
    const RegexMatch match = groups_of(text, data);
    if (!visit(match)) {
      return;
    }
    start = static_cast<std::size_t>(match[0].data() - text.data()) + match[0].size();
    after_empty = match[0].empty();
  }
}

bool Regex::matches(std::string_view text) const {
  bool found = false;
  for_each(text, [&](const RegexMatch&) {
    found = true;
    return false;
  });
  return found;
}

std::string Regex::replace(std::string_view text, int group) const {
  std::string out;
  std::size_t copied = 0;
  for_each(text, [&](const RegexMatch& match) {
    const auto begin = static_cast<std::size_t>(match[0].data() - text.data());
    out += text.substr(copied, begin - copied);
    if (group >= 0) {
      out += match.at(static_cast<std::size_t>(group));
    }
    copied = begin + match[0].size();
    return true;
  });
  out += text.substr(copied);
  return out;
}

}  // namespace bifocal
