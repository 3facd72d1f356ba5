// Generation with a cache of constant size. What a sequence remembers of a layer:
//   window W, n sink tokens   keys and values of the first n tokens, pinned, and a ring of the last
//                             W others
//   states                    the mLSTM's C, n and m in the compute type (float32)
//   full attention (teacher)  keys and values of every token, in memory that grows in steps
// A prompt is read in chunks through the training ops, answers grow token by token. What is
// computed for a sequence does not depend on the others: the same bits whatever shares the batch.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "generate/layer_cache.h"
#include "generate/resident_weights.h"
#include "generate/scratch.h"
#include "model/decoder.h"
#include "ops/decode_layer.h"
#include "ops/decode_state.h"

namespace bifocal {

class Generator {
 public:
  // Room for `batch` sequences, each in a slot of its own. Takes decoders whose weights lie whole
  // on this rank: replicated, or in parts over a group of one, then in any type (bf16 stays bf16
  // and is converted in registers). The decoder must outlive the generator.
  Generator(Context context, Decoder& decoder, std::int64_t batch);

  std::int64_t batch() const { return static_cast<std::int64_t>(positions_.size()); }

  // Appends ids (at least one) to the sequence of a slot, at most `chunk` at once. Returns logits
  // [1, vocabulary] after the last, on the device, valid until the next call.
  ConstTensorView prefill(std::int64_t slot,
                          std::span<const std::int32_t> ids,
                          std::int64_t chunk = 512);

  // Appends one token to each of some sequences. Slots are distinct. Returns logits
  // [slots, vocabulary] in the order of `slots`, on the device, valid until the next call.
  ConstTensorView feed(std::span<const std::int64_t> slots, std::span<const std::int32_t> ids);

  // The slot's sequence back to empty; memory that has grown for it is given back.
  void reset(std::int64_t slot);

  // Tokens of the slot's sequence so far, steps that are queued included.
  std::int64_t tokens(std::int64_t slot) const {
    return positions_[static_cast<std::size_t>(slot)];
  }

  // Bytes of all caches and states, room to grow included.
  std::size_t cache_bytes() const;

  const ModelConfig& config() const { return decoder_->config(); }

  // ---- steps whose tokens the host need not know ----
  // For each step choose(slots), queue_step(), whatever sets state().token of these sequences next,
  // and count_step(). What queue_step() queues may be recorded (ops/recording.h) and replayed until
  // revision() changes.

  // Logits of a step, and what is needed to draw from them, row by row.
  struct StepRows {
    ConstTensorView logits;            // [rows, vocabulary]
    ConstTensorView sequences;         // [rows] i32
    ConstTensorView streams, indices;  // [rows] i64, of Sample
    TensorView ids;                    // [rows] i32: what was fed; free for what is drawn
  };

  // The next step appends a token to each of these sequences, and there is room for it. Slots are
  // distinct.
  void choose(std::span<const std::int64_t> slots);
  StepRows queue_step();
  // A step was queued, or replayed.
  void count_step();

  std::int64_t revision() const { return revision_ + scratch_.times_grown(); }

  // Token, position, stream and tokens drawn of each slot, on the device.
  const SequenceState& state() const { return state_; }

 private:
  // A chunk of one sequence on its way through the model.
  struct Chunk;
  struct Projected;

  // What a token's step knows of layers with one kind of window.
  struct Places {
    Tensor places, lengths;  // [batch] i32
  };

  using WindowKind = std::pair<std::int64_t, std::int64_t>;  // ring and pinned tokens

  static WindowKind kind_of(const MixerSettings& settings) {
    return {ring_tokens(settings), pinned_tokens(settings)};
  }

  void check_ids(std::span<const std::int32_t> ids) const;
  void make_room();

  ConstTensorView read_chunk(std::int64_t slot,
                             std::span<const std::int32_t> ids,
                             bool wants_logits);
  void chunk_layer(std::int64_t index, const Chunk& chunk, const TensorView& x);
  TensorView mix(std::int64_t index, const Chunk& chunk, const ConstTensorView& a);
  Projected project(std::int64_t index, const Chunk& chunk, const ConstTensorView& a);
  TensorView near(std::int64_t index, const Chunk& chunk, const Projected& p);
  TensorView far(std::int64_t index,
                 const Chunk& chunk,
                 const ConstTensorView& a,
                 const Projected& p);
  // y [rows, out] = x weight^T + bias.
  void linear(const TensorView& y,
              const ConstTensorView& x,
              const ConstTensorView& weight,
              const ConstTensorView& bias = {});
  void rms_norm(const TensorView& y, const ConstTensorView& x, const ConstTensorView& weight);
  ConstTensorView in_compute_type(const ConstTensorView& weight);

  void step_layer(std::int64_t index, std::int64_t rows, const TensorView& x);
  TensorView step_mixer(std::int64_t index, std::int64_t rows, const TensorView& x);

  TensorView take(Use use, const Shape& shape) { return scratch_.take(use, context_.dtype, shape); }

  TensorView take_sums(Use use, const Shape& shape) {
    return scratch_.take(use, sum_type(context_.dtype), shape);
  }

  Context context_;
  Decoder* decoder_;
  ResidentWeights weights_;
  Tensor frequencies_;                   // [head_dim / 2] f64, of the rotary positions
  std::vector<LayerCache> caches_;       // [layers]
  std::vector<std::int64_t> positions_;  // [batch]: tokens fed so far
  Scratch scratch_;
  std::vector<std::int64_t> slots_;  // chosen
  std::int64_t revision_ = 0;
  // On the device.
  Tensor tokens_, device_positions_, streams_, drawn_;  // [batch], see state_
  SequenceState state_;
  Tensor row_ids_, row_positions_, row_sequences_;  // [batch] i32, of the chosen
  Tensor row_streams_, row_indices_;                // [batch] i64
  std::map<WindowKind, Places> places_;
};

struct GenerateRequest {
  std::vector<std::int32_t> prompt;  // at least one token
  // Of its random numbers: an answer depends on (seed, stream, prompt) and the options alone.
  std::uint64_t stream = 0;
};

struct GenerateOptions {
  std::int64_t max_new_tokens = 256;
  double temperature = 0.0;  // 0: greedy; see ops/sample.h
  std::int64_t top_k = 0;
  double top_p = 1.0;
  std::uint64_t seed = 0;
  std::vector<std::int32_t> stop_ids;
  std::int64_t prefill_chunk = 512;  // prompt tokens at once
};

struct GeneratedAnswer {
  std::vector<std::int32_t> ids;  // the stop token included
  bool stopped = false;           // false: max_new_tokens reached
};

// Each may be empty. `request` is an index into the requests.
struct GenerateEvents {
  std::function<void(std::int64_t request, std::int32_t id)> on_token;
  std::function<void(std::int64_t request, const GeneratedAnswer& answer)> on_finish;
  std::function<void(std::int64_t request)> on_begin;  // its prompt is read next
};

// Answers to any number of requests, in their order. At most generator.batch() advance together; a
// slot that becomes free takes the next request. Whatever the slots held is forgotten. Throws Error
// for an empty prompt and for ids outside the vocabulary, before anything is computed.
std::vector<GeneratedAnswer> generate(Context context,
                                      Generator& generator,
                                      std::span<const GenerateRequest> requests,
                                      const GenerateOptions& options,
                                      const GenerateEvents& events = {});

// Appends `more` to the sequence of slot 0 as it stands, and answers: a conversation that goes on
// without reading itself again. The last token of the answer has not been appended.
GeneratedAnswer continue_sequence(Context context,
                                  Generator& generator,
                                  const GenerateRequest& more,
                                  const GenerateOptions& options,
                                  const std::function<void(std::int32_t id)>& on_token = {});

}  // namespace bifocal
