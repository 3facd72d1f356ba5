// The next token from logits.
#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/random.h"
#include "ops/vector_math.h"

namespace bifocal {

namespace {

constexpr const char* kWhere = "sample";

template <class T>
std::int64_t largest_index(const T* logits, std::int64_t vocabulary) {
  return std::max_element(logits, logits + vocabulary) - logits;
}

// Unnormalised probabilities of one row; ids that top_k or top_p exclude get 0.
template <class T>
class Distribution {
 public:
  Distribution(const Sample& op, const T* logits, std::int64_t vocabulary)
      : weights_(static_cast<std::size_t>(vocabulary)) {
    const auto largest = static_cast<double>(logits[largest_index(logits, vocabulary)]);
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = std::exp((static_cast<double>(logits[i]) - largest) / op.temperature);
    }
    const bool cuts_count = op.top_k > 0 && op.top_k < vocabulary;
    if (cuts_count || op.top_p < 1.0) {
      keep_largest(logits, cuts_count ? op.top_k : vocabulary, op.top_p);
    }
  }

  // The id at part u of [0, 1) of the distribution, ids in increasing order.
  std::int64_t at(double u) const {
    const double target = u * std::accumulate(weights_.begin(), weights_.end(), 0.0);
    double sum = 0.0;
    std::size_t last = 0;
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] > 0.0) {
        sum += weights_[i];
        last = i;
        if (sum > target) {
          break;
        }
      }
    }
    return static_cast<std::int64_t>(last);
  }

 private:
  void keep_largest(const T* logits, std::int64_t count, double top_p) {
    std::vector<std::size_t> order(weights_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto before = [&](std::size_t a, std::size_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + count, order.end(), before);
    double total = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
      total += weights_[order[static_cast<std::size_t>(i)]];
    }
    double sum = 0.0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const bool kept = i < static_cast<std::size_t>(count) && (i == 0 || sum < top_p * total);
      double& weight = weights_[order[i]];
      sum += weight;
      weight = kept ? weight : 0.0;
    }
  }

  std::vector<double> weights_;
};

template <class T>
void sample(const Sample& op) {
  const std::int64_t vocabulary = op.logits.shape[1];
  auto* ids = op.ids.as<std::int32_t>();
  const T* logits = op.logits.as<T>();
  const auto* streams = op.temperature > 0.0 ? op.streams.as<std::int64_t>() : nullptr;
  for (std::int64_t row = 0; row < op.ids.size(); ++row) {
    const T* of_row = logits + row * vocabulary;
    std::int64_t id = 0;
    if (streams == nullptr) {
      id = largest_index(of_row, vocabulary);
    } else {
      const auto stream = static_cast<std::uint64_t>(streams[row]);
      id = Distribution<T>(op, of_row, vocabulary).at(random_uniform(op.seed, stream, op.index));
    }
    ids[row] = static_cast<std::int32_t>(id);
  }
}

}  // namespace

void Sample::check() const {
  require_tensor(kWhere, "ids", ids, DType::i32, {ids.shape[0]});
  require_tensor(kWhere, "logits", logits, logits.dtype, {ids.shape[0], logits.shape[1]});
  BIFOCAL_REQUIRE(logits.shape[1] > 0,
                  "[{}] wanted a vocabulary of at least one id, got none: check the model's head",
                  kWhere);
  BIFOCAL_REQUIRE(temperature >= 0.0 && std::isfinite(temperature),
                  "[{}] wanted a temperature from 0 on, got {}: 0 takes the largest logit",
                  kWhere,
                  temperature);
  BIFOCAL_REQUIRE(top_k >= 0, "[{}] wanted top_k from 0 on, got {}: 0 keeps all", kWhere, top_k);
  BIFOCAL_REQUIRE(top_p > 0.0 && top_p <= 1.0,
                  "[{}] wanted top_p above 0 and up to 1, got {}: 1 keeps all",
                  kWhere,
                  top_p);
  if (temperature > 0.0) {
    require_tensor(kWhere, "streams", streams, DType::i64, {ids.shape[0]});
  }
}

void run(CpuStream&, const Sample& op) {
  dispatch_real(kWhere, op.logits.dtype, [&]<class T>(T) { sample<T>(op); });
}

}  // namespace bifocal
