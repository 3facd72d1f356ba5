// Divergences as JSON.
#include "evaluate/divergence_json.h"

#include <fmt/format.h>

namespace bifocal {

std::string position_name(std::size_t bucket) {
  const std::int64_t first = std::int64_t{1} << bucket;
  return bucket == 0 ? "1" : fmt::format("{}-{}", first, 2 * first - 1);
}

nlohmann::ordered_json to_json(const DivergenceSums& sums) {
  return {{"tokens", sums.tokens},
          {"kl", sums.mean_kl()},
          {"top1_agreement", sums.agreement()},
          {"student_perplexity", sums.student_perplexity()},
          {"teacher_perplexity", sums.teacher_perplexity()}};
}

nlohmann::ordered_json by_position_json(const Divergence& divergence) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (std::size_t bucket = 0; bucket < divergence.by_position.size(); ++bucket) {
    const DivergenceSums& sums = divergence.by_position[bucket];
    if (sums.tokens > 0.0) {
      nlohmann::ordered_json entry{{"position", position_name(bucket)}};
      entry.update(to_json(sums));
      list.push_back(entry);
    }
  }
  return list;
}

}  // namespace bifocal
