// Answers: prompts into free slots, one token of every running sequence at a time.
#include <algorithm>
#include <deque>
#include <memory>

#include "generate/generator.h"
#include "ops/mailbox.h"
#include "ops/recording.h"
#include "ops/sample.h"
#include "ops/transfer.h"

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
  std::int64_t queued;  // tokens of its answer that are drawn or will be by steps under way

  bool operator==(const Running& other) const {
    return slot == other.slot && request == other.request;
  }
};

// Steps are queued ahead of what the host has seen where that keeps a device busy: a sequence that
// turns out to have ended has then been fed a token too many, which is dropped.
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
        mailbox_(make_mailbox(context.stream, generator.batch())),
        answers_(requests.size()) {}

  std::vector<GeneratedAnswer> run_all() {
    steps_ahead_ = mailbox_->is_behind() ? 1 : 0;
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
    for (; !flights_.empty(); flights_.pop_front()) {
      mailbox_->take();  // ended sequences alone
    }
    return std::move(answers_);
  }

  // Request 0 in slot 0 as it stands. No step ahead: the sequence goes on from where it ends.
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
    const Running sequence{free_.back(), index, 1};
    free_.pop_back();
    if (take(sequence, draw_first(sequence))) {
      running_.push_back(sequence);
    }
  }

  // Reads the prompt and draws the first token, into the sequence's state and for the host.
  std::int32_t draw_first(const Running& sequence) {
    const GenerateRequest& asked = request(sequence.request);
    const ConstTensorView logits =
        generator_.prefill(sequence.slot, asked.prompt, options_.prefill_chunk);
    const SequenceState& state = generator_.state();
    const auto own = [&](const TensorView& all) {
      return all.rows(sequence.slot, sequence.slot + 1);
    };
    const auto set = [&](const TensorView& all, std::int64_t value) {
      run(context_.stream, Upload{.y = own(all), .x = {&value, DType::i64, {1}}});
    };
    set(state.stream, static_cast<std::int64_t>(asked.stream));
    set(state.drawn, 0);
    sample(own(state.token), logits, own(state.stream), own(state.drawn));
    set(state.drawn, 1);
    std::int32_t id = 0;
    run(context_.stream, Download{.y = {&id, DType::i32, {1}}, .x = own(state.token)});
    return id;
  }

  void sample(const TensorView& ids,
              const ConstTensorView& logits,
              const ConstTensorView& streams,
              const ConstTensorView& indices) {
    run(context_.stream,
        Sample{.ids = ids,
               .logits = logits,
               .temperature = options_.temperature,
               .top_k = options_.top_k,
               .top_p = options_.top_p,
               .seed = options_.seed,
               .streams = streams,
               .indices = indices});
  }

  // Queues steps until enough are under way, and takes the tokens of the first.
  void advance() {
    while (flights_.size() <= steps_ahead_ && launch()) {
    }
    if (!flights_.empty()) {
      collect();
    }
  }

  // A step of every sequence that wants another token. Whether there was one.
  bool launch() {
    std::vector<Running> rows;
    std::vector<std::int64_t> slots;
    for (Running& sequence : running_) {
      if (sequence.queued < options_.max_new_tokens) {
        ++sequence.queued;
        rows.push_back(sequence);
        slots.push_back(sequence.slot);
      }
    }
    if (rows.empty()) {
      return false;
    }
    generator_.choose(slots);
    queue();
    generator_.count_step();
    mailbox_->post(drawn_);
    flights_.push_back(std::move(rows));
    return true;
  }

  // A step and its draw: as they are the first time, then recorded, then replayed.
  void queue() {
    const std::int64_t revision = generator_.revision();
    if (recording_ && recorded_ == revision) {
      recording_->replay();
      return;
    }
    recording_.reset();
    if (queued_ == revision) {
      recording_ = record(context_.stream, [this] { queue_ops(); });
      recorded_ = revision;
      recording_->replay();
      return;
    }
    queue_ops();
    queued_ = generator_.revision();  // after buffers have grown for it
  }

  void queue_ops() {
    const Generator::StepRows step = generator_.queue_step();
    drawn_ = step.ids;
    sample(step.ids, step.logits, step.streams, step.indices);
    run(context_.stream,
        StepEnd{.token = generator_.state().token, .ids = step.ids, .sequences = step.sequences});
  }

  void collect() {
    const std::vector<std::int32_t> drawn = mailbox_->take();
    const std::vector<Running> rows = std::move(flights_.front());
    flights_.pop_front();
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const auto found = std::ranges::find(running_, rows[row]);
      if (found != running_.end() && !take(rows[row], drawn[row])) {
        running_.erase(found);
      }
    }
  }

  // Whether the sequence goes on.
  bool take(const Running& sequence, std::int32_t id) {
    GeneratedAnswer& own = answer(sequence.request);
    own.ids.push_back(id);
    own.stopped = std::ranges::find(options_.stop_ids, id) != options_.stop_ids.end();
    if (events_.on_token) {
      events_.on_token(sequence.request, id);
    }
    if (!own.stopped && static_cast<std::int64_t>(own.ids.size()) < options_.max_new_tokens) {
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
  std::unique_ptr<Mailbox> mailbox_;
  std::vector<GeneratedAnswer> answers_;
  std::vector<std::int64_t> free_;
  std::vector<Running> running_;
  std::size_t next_ = 0;
  std::deque<std::vector<Running>> flights_;  // steps whose tokens have not been taken
  std::size_t steps_ahead_ = 0;
  ConstTensorView drawn_;  // of the last step
  std::unique_ptr<Recording> recording_;
  std::int64_t recorded_ = -1;  // revision of the recording
  std::int64_t queued_ = -1;    // revision of the last step that was not recorded
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
