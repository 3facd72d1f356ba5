// The next token from logits.
#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
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
      : logits_(logits), weights_(static_cast<std::size_t>(vocabulary)) {
    const auto largest = static_cast<double>(logits[largest_index(logits, vocabulary)]);
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = std::exp((static_cast<double>(logits[i]) - largest) / op.temperature);
    }
    if (op.top_k > 0 && op.top_k < vocabulary) {
      keep_largest(op.top_k);
    }
    if (op.top_p < 1.0) {
      keep_probable(op.top_p);
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
  void keep_largest(std::int64_t count) {
    std::vector<T> sorted(logits_, logits_ + weights_.size());
    const auto smallest = sorted.begin() + count - 1;
    std::nth_element(sorted.begin(), smallest, sorted.end(), std::greater<>());
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      weights_[i] = logits_[i] < *smallest ? 0.0 : weights_[i];
    }
  }

  // The order is made in pieces of growing size: of a large vocabulary few ids are probable.
  void keep_probable(double top_p) {
    constexpr std::ptrdiff_t kFirstPiece = 64;
    constexpr std::ptrdiff_t kGrowth = 4;
    const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
    std::vector<std::int32_t> order(weights_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto before = [&](std::int32_t a, std::int32_t b) {
      return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a > b;
    };
    double sum = 0.0;
    auto begin = order.begin();
    auto piece = kFirstPiece;
    while (begin != order.end() && sum < top_p * total) {
      const auto end = begin + std::min(piece, order.end() - begin);
      std::nth_element(begin, end - 1, order.end(), before);
      std::sort(begin, end, before);
      while (begin != end && sum < top_p * total) {
        sum += weights_[static_cast<std::size_t>(*begin)];
        ++begin;
      }
      piece *= kGrowth;
    }
    for (; begin != order.end(); ++begin) {
      weights_[static_cast<std::size_t>(*begin)] = 0.0;
    }
  }

  const T* logits_;
  std::vector<double> weights_;
};

template <class T>
void sample(const Sample& op) {
  const std::int64_t vocabulary = op.logits.shape[1];
  auto* ids = op.ids.as<std::int32_t>();
  const T* logits = op.logits.as<T>();
  const bool draws = op.temperature > 0.0;
  const auto* streams = draws ? op.streams.as<std::int64_t>() : nullptr;
  const auto* indices = draws ? op.indices.as<std::int64_t>() : nullptr;
  const std::int64_t work = draws ? vocabulary * 10 : vocabulary;
  parallel_ranges(op.ids.size(), 1, work, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* of_row = logits + row * vocabulary;
      std::int64_t id = 0;
      if (!draws) {
        id = largest_index(of_row, vocabulary);
      } else {
        const double u = random_uniform(op.seed,
                                        static_cast<std::uint64_t>(streams[row]),
                                        static_cast<std::uint64_t>(indices[row]));
        id = Distribution<T>(op, of_row, vocabulary).at(u);
      }
      ids[row] = static_cast<std::int32_t>(id);
    }
  });
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
    require_tensor(kWhere, "indices", indices, DType::i64, {ids.shape[0]});
  }
}

void run(CpuStream&, const Sample& op) {
  dispatch_real(kWhere, op.logits.dtype, [&]<class T>(T) { sample<T>(op); });
}

}  // namespace bifocal
