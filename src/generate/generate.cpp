// Answers: prompts into free slots, one token of every running sequence at a time.
#include <algorithm>
#include <optional>

#include "generate/generator.h"
#include "ops/sample.h"

namespace bifocal {

namespace {

void check_prompt(const GenerateRequest& request, std::int64_t vocabulary) {
  BIFOCAL_REQUIRE(!request.prompt.empty(),
                  "[generate] a prompt has no token: give each at least one");
  for (const std::int32_t id : request.prompt) {
    BIFOCAL_REQUIRE(id >= 0 && id < vocabulary,
                    "[generate] wanted ids from 0 to {}, got {}: the prompt belongs to another "
                    "vocabulary",
                    vocabulary - 1,
                    id);
  }
}

// One sequence on its way.
struct Running {
  std::int64_t slot;
  std::int64_t request;
  std::int32_t last;  // drawn, not yet fed
};

class Answering {
 public:
  Answering(Context context,
            Generator& generator,
            std::span<const GenerateRequest> requests,
            const GenerateOptions& options,
            const GenerateEvents& events)
      : context_(context),
        generator_(generator),
        requests_(requests),
        options_(options),
        events_(events),
        answers_(requests.size()) {}

  std::vector<GeneratedAnswer> run_all() {
    for (std::int64_t slot = generator_.batch() - 1; slot >= 0; --slot) {
      generator_.reset(slot);
      free_.push_back(slot);
    }
    while (next_ < requests_.size() || !running_.empty()) {
      while (next_ < requests_.size() && !free_.empty()) {
        begin();
      }
      advance();
    }
    return std::move(answers_);
  }

  // Request 0 in slot 0 as it stands.
  GeneratedAnswer run_one() {
    free_.push_back(0);
    begin();
    while (!running_.empty()) {
      advance();
    }
    return std::move(answers_[0]);
  }

 private:
  const GenerateRequest& request(std::int64_t index) const {
    return requests_[static_cast<std::size_t>(index)];
  }

  GeneratedAnswer& answer(std::int64_t index) { return answers_[static_cast<std::size_t>(index)]; }

  void begin() {
    const auto index = static_cast<std::int64_t>(next_++);
    if (events_.on_begin) {
      events_.on_begin(index);
    }
    if (options_.max_new_tokens <= 0) {
      finish(index);
      return;
    }
    Running sequence{free_.back(), index, 0};
    free_.pop_back();
    const ConstTensorView logits =
        generator_.prefill(sequence.slot, request(index).prompt, options_.prefill_chunk);
    const std::vector<std::int32_t> drawn = draw(logits, std::span(&sequence, 1));
    if (take(sequence, drawn[0])) {
      running_.push_back(sequence);
    }
  }

  void advance() {
    if (running_.empty()) {
      return;
    }
    std::vector<std::int64_t> slots;
    std::vector<std::int32_t> ids;
    for (const Running& sequence : running_) {
      slots.push_back(sequence.slot);
      ids.push_back(sequence.last);
    }
    const std::vector<std::int32_t> drawn = draw(generator_.feed(slots, ids), running_);
    std::vector<Running> still;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      if (take(running_[i], drawn[i])) {
        still.push_back(running_[i]);
      }
    }
    running_ = std::move(still);
  }

  std::vector<std::int32_t> draw(const ConstTensorView& logits,
                                 std::span<const Running> sequences) const {
    const auto rows = static_cast<std::int64_t>(sequences.size());
    std::vector<std::int32_t> ids(sequences.size());
    std::vector<std::int64_t> streams;
    std::vector<std::int64_t> indices;
    for (const Running& sequence : sequences) {
      streams.push_back(static_cast<std::int64_t>(request(sequence.request).stream));
      indices.push_back(static_cast<std::int64_t>(
          answers_[static_cast<std::size_t>(sequence.request)].ids.size()));
    }
    run(context_.stream,
        Sample{.ids = {ids.data(), DType::i32, {rows}},
               .logits = logits,
               .temperature = options_.temperature,
               .top_k = options_.top_k,
               .top_p = options_.top_p,
               .seed = options_.seed,
               .streams = {streams.data(), DType::i64, {rows}},
               .indices = {indices.data(), DType::i64, {rows}}});
    return ids;
  }

  // Whether the sequence goes on.
  bool take(Running& sequence, std::int32_t id) {
    GeneratedAnswer& own = answer(sequence.request);
    own.ids.push_back(id);
    own.stopped = std::ranges::find(options_.stop_ids, id) != options_.stop_ids.end();
    if (events_.on_token) {
      events_.on_token(sequence.request, id);
    }
    if (!own.stopped && static_cast<std::int64_t>(own.ids.size()) < options_.max_new_tokens) {
      sequence.last = id;
      return true;
    }
    finish(sequence.request);
    if (next_ < requests_.size()) {
      generator_.reset(sequence.slot);
    }
    free_.push_back(sequence.slot);
    return false;
  }

  void finish(std::int64_t index) {
    if (events_.on_finish) {
      events_.on_finish(index, answer(index));
    }
  }

  Context context_;
  Generator& generator_;
  std::span<const GenerateRequest> requests_;
  const GenerateOptions& options_;
  const GenerateEvents& events_;
  std::vector<GeneratedAnswer> answers_;
  std::vector<std::int64_t> free_;
  std::vector<Running> running_;
  std::size_t next_ = 0;
};

}  // namespace

std::vector<GeneratedAnswer> generate(Context context,
                                      Generator& generator,
                                      std::span<const GenerateRequest> requests,
                                      const GenerateOptions& options,
                                      const GenerateEvents& events) {
  for (const GenerateRequest& request : requests) {
    check_prompt(request, generator.config().vocabulary);
  }
  return Answering(context, generator, requests, options, events).run_all();
}

GeneratedAnswer continue_sequence(Context context,
                                  Generator& generator,
                                  const GenerateRequest& more,
                                  const GenerateOptions& options,
                                  const std::function<void(std::int32_t id)>& on_token) {
  check_prompt(more, generator.config().vocabulary);
  GenerateEvents events;
  if (on_token) {
    events.on_token = [&](std::int64_t, std::int32_t id) { on_token(id); };
  }
  return Answering(context, generator, {&more, 1}, options, events).run_one();
}

}  // namespace bifocal
