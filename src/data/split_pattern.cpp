// Matching by PCRE2's compiled code.
#include "data/split_pattern.h"

#include <algorithm>
#include <array>
#include <pcre2.h>

#include "core/error.h"
#include "data/utf8.h"

namespace bifocal {

namespace {

constexpr std::size_t kMaxPattern = 64 << 10;
constexpr std::size_t kJitStackStart = 32 << 10;
constexpr std::size_t kJitStackMax = 16 << 20;
constexpr std::uint32_t kHeapLimitKib = 256 << 10;  // where there is no compiler for the machine
// Steps of one search: some, and some for each byte, so that long runs of one kind of character
// pass and exponential patterns do not.
constexpr std::size_t kSteps = 5'000'000;
constexpr std::size_t kStepsPerByte = 16;
// A search is cut into windows of starts, so that the clock is looked at between them: the smaller
// the longer a start may take, which is as long as the text.
constexpr std::size_t kMinWindow = 16;
constexpr std::size_t kMaxWindow = 1024;
constexpr std::size_t kWindowCost = 1 << 26;
constexpr unsigned kCallsPerCheck = 1024;
constexpr double kSeconds = 30.0;
constexpr double kSecondsPerByte = 1e-5;

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.data());
}

// What a thread needs for matching.
struct MatchScratch {
  MatchScratch()
      : context(pcre2_match_context_create(nullptr), pcre2_match_context_free),
        data(pcre2_match_data_create(1, nullptr), pcre2_match_data_free),
        stack(pcre2_jit_stack_create(kJitStackStart, kJitStackMax, nullptr), pcre2_jit_stack_free) {
    BIFOCAL_REQUIRE(context && data, "[tokenizer] out of memory for matching a pattern");
    pcre2_set_heap_limit(context.get(), kHeapLimitKib);
    if (stack) {
      pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    }
  }

  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context;
  std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data;
  std::unique_ptr<pcre2_jit_stack, decltype(&pcre2_jit_stack_free)> stack;
};

MatchScratch& match_scratch() {
  thread_local MatchScratch scratch;
  return scratch;
}

}  // namespace

SplitPattern::SplitPattern(std::string_view pattern) : text_(pattern) {
  BIFOCAL_REQUIRE(pattern.size() <= kMaxPattern,
                  "[tokenizer] a pattern has {} bytes: at most {} are read",
                  pattern.size(),
                  kMaxPattern);
  const std::string translated = to_pcre2(pattern);
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  BIFOCAL_REQUIRE(context != nullptr, "[tokenizer] out of memory for a pattern");
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE place = 0;
  pcre2_code* code = pcre2_compile(
      bytes_of(translated),
      translated.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_USE_OFFSET_LIMIT | PCRE2_NEVER_BACKSLASH_C,
      &error,
      &place,
      context.get());
  BIFOCAL_REQUIRE(code != nullptr,
                  "[tokenizer] the pattern \"{}\" is wrong: {} (at byte {} of \"{}\")",
                  text_,
                  message_of(error),
                  place,
                  translated);
  code_ = std::shared_ptr<const void>(code, [code](const void*) { pcre2_code_free(code); });
  // Where the machine forbids compiled code, the same is interpreted.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}

std::chrono::duration<double> time_to_split(std::size_t text_bytes) {
  return std::chrono::duration<double>(kSeconds +
                                       kSecondsPerByte * static_cast<double>(text_bytes));
}

SplitBudget::SplitBudget(std::chrono::duration<double> time)
    : end_(std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(time)) {}

void SplitBudget::check(const SplitPattern& pattern, bool at_once) {
  if (!at_once && ++calls_ % kCallsPerCheck != 0) {
    return;
  }
  BIFOCAL_REQUIRE(std::chrono::steady_clock::now() < end_,
                  "[tokenizer] the pattern \"{}\" takes too long on this text",
                  pattern.text());
}

Splitter::Splitter(const SplitPattern& pattern, std::string_view text, SplitBudget& budget)
    : pattern_(pattern), text_(text), budget_(budget) {}

bool Splitter::search(std::size_t from) {
  MatchScratch& scratch = match_scratch();
  const auto* code = static_cast<const pcre2_code*>(pattern_.code());
  pcre2_set_match_limit(scratch.context.get(),
                        static_cast<std::uint32_t>(std::min<std::size_t>(
                            kSteps + kStepsPerByte * text_.size(), UINT32_MAX)));
  const std::size_t window = std::clamp(kWindowCost / (text_.size() + 1), kMinWindow, kMaxWindow);
  for (std::size_t start = from;;) {
    std::size_t end = std::min(start + window, text_.size());
    while (end < text_.size() && (static_cast<std::uint8_t>(text_[end]) & 0xC0U) == 0x80) {
      ++end;  // windows begin at characters
    }
    pcre2_set_offset_limit(scratch.context.get(), end == text_.size() ? end : end - 1);
    const int count = pcre2_match(code,
                                  bytes_of(text_),
                                  text_.size(),
                                  start,
                                  PCRE2_NO_UTF_CHECK,
                                  scratch.data.get(),
                                  scratch.context.get());
    if (count >= 0) {
      const PCRE2_SIZE* place = pcre2_get_ovector_pointer(scratch.data.get());
      match_begin_ = place[0];
      match_end_ = place[1];
      budget_.check(pattern_, false);
      return true;
    }
    BIFOCAL_REQUIRE(count == PCRE2_ERROR_NOMATCH,
                    "[tokenizer] the pattern \"{}\" cannot be matched at byte {} of a text of {}: "
                    "{}",
                    pattern_.text(),
                    start,
                    text_.size(),
                    message_of(count));
    if (end == text_.size()) {
      return false;
    }
    budget_.check(pattern_, true);
    start = end;
  }
}

// An empty match counts unless the match before it ends there.
bool Splitter::find_match() {
  while (search_from_ <= text_.size() && search(search_from_)) {
    if (match_begin_ == match_end_ && last_match_end_ == match_end_) {
      search_from_ += search_from_ < text_.size() ? utf8_part(text_, search_from_).bytes : 1;
      continue;
    }
    search_from_ = match_end_;
    last_match_end_ = match_end_;
    return true;
  }
  search_from_ = text_.size() + 1;
  return false;
}

std::optional<std::string_view> Splitter::next() {
  for (;;) {
    if (!has_match_) {
      has_match_ = find_match();
      const std::size_t end = has_match_ ? match_begin_ : text_.size();
      if (piece_begin_ < end) {
        const std::size_t begin = piece_begin_;
        piece_begin_ = end;
        return text_.substr(begin, end - begin);
      }
      if (!has_match_) {
        return std::nullopt;
      }
    }
    has_match_ = false;
    piece_begin_ = match_end_;
    if (match_begin_ < match_end_) {
      return text_.substr(match_begin_, match_end_ - match_begin_);
    }
  }
}

}  // namespace bifocal
