// How far a student is from its teacher, by position in the document; and how far a model looks
// back.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "data/row.h"
#include "model/decoder.h"

namespace bifocal {

// Sums over kept tokens; the means are what people read.
struct DivergenceSums {
  double tokens = 0.0;
  double kl = 0.0;          // KL(teacher || student), nats
  double agreements = 0.0;  // both have the same largest logit
  double predicted = 0.0;   // tokens with a successor in the document
  double student_ce = 0.0;  // nats over those
  double teacher_ce = 0.0;

  double mean_kl() const { return tokens > 0.0 ? kl / tokens : 0.0; }

  double agreement() const { return tokens > 0.0 ? agreements / tokens : 0.0; }

  double student_perplexity() const;
  double teacher_perplexity() const;
};

// Bucket k holds positions [2^k, 2^(k+1)) counted from 1.
struct Divergence {
  std::vector<DivergenceSums> by_position;
  DivergenceSums all() const;
};

// Rows to measure on, by index.
using EvaluationRows = std::function<Row(std::int64_t index)>;

// Measures models on whole rows, dealt to the ranks of the world in turn. Every call is collective:
// ranks without a row take part in the gathers of sharded weights.
class Evaluator {
 public:
  // chunk: tokens whose logits exist at once. Collective.
  Evaluator(Context context, Communicator& world, std::int64_t chunk);

  // Sees the student's layers on a row; may be empty.
  using RowObserver = std::function<Decoder::Observer(const Row& row)>;

  Divergence divergence(Decoder& student,
                        Decoder& teacher,
                        const EvaluationRows& rows,
                        std::int64_t count,
                        const RowObserver& observe = {});

  struct ReachPoint {
    std::int64_t distance = 0;  // D
    double mean_kl = 0.0;       // KL(model || model with the token D back replaced), nats
    double samples = 0.0;
  };

  // Mean KL between the model's outputs at t with and without the token at t - D replaced by a
  // random other one, D in powers of two: how far the model really looks. `replacements` tokens per
  // row, one at a time, chosen by seed.
  std::vector<ReachPoint> reach(Decoder& model,
                                const EvaluationRows& rows,
                                std::int64_t count,
                                std::int64_t replacements,
                                std::uint64_t seed);

 private:
  void add_row(Decoder& student,
               Decoder& teacher,
               const Row& row,
               const Decoder::Observer& observer,
               std::vector<DivergenceSums>& sums);
  void add_replacement(Decoder& model,
                       const Row& row,
                       std::int64_t replaced,
                       std::int32_t id,
                       std::vector<ReachPoint>& points);
  Row row_of(const EvaluationRows& rows, std::int64_t round, std::int64_t count) const;

  Context context_;
  Communicator* world_;
  std::unique_ptr<Communicator> self_;
  std::int64_t chunk_;
};

}  // namespace bifocal
