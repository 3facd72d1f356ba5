// Slots and key ranges of a chunk, made on the host and brought over at once.
#include "generate/chunk_plan.h"

#include <algorithm>
#include <vector>

#include "ops/decode_state.h"
#include "ops/transfer.h"

namespace bifocal {

namespace {

// Lists of numbers that become one tensor.
class Lists {
 public:
  std::vector<std::int32_t> numbers;

  // Numbers value(0) .. value(count - 1); returns where they begin.
  template <class Value>
  std::int64_t add(std::int64_t count, const Value& value) {
    const auto begin = static_cast<std::int64_t>(numbers.size());
    for (std::int64_t i = 0; i < count; ++i) {
      numbers.push_back(static_cast<std::int32_t>(value(i)));
    }
    return begin;
  }
};

}  // namespace

ChunkPlan make_chunk_plan(Context context,
                          const MixerSettings& settings,
                          std::int64_t position,
                          std::int64_t count) {
  const std::int64_t window = ring_tokens(settings);
  const std::int64_t pinned = pinned_tokens(settings);
  const bool full = settings.is_full();
  ChunkPlan plan{.position = position, .count = count};
  plan.halo = full ? 0 : std::min(position, window - 1);
  plan.pinned = full ? 0 : std::min(pinned, position + count);
  plan.cached = std::min(plan.pinned, position);
  // Pinned tokens first; of the others, a ring keeps the last.
  const std::int64_t stays = full ? count : std::clamp<std::int64_t>(pinned - position, 0, count);
  plan.writes[0] = {0, stays, {}};
  plan.writes[1] = {full ? count : std::max(stays, count - window), count, {}};
  const std::int64_t first = position - plan.halo;
  const auto place = [&](std::int64_t token) { return cache_place(token, window, pinned); };
  const auto begin_of = [&](std::int64_t i) {
    return full ? 0 : std::max<std::int64_t>(0, position + i - window + 1);
  };

  Lists lists;
  std::array<std::int64_t, 2> writes{};
  for (std::size_t i = 0; i < writes.size(); ++i) {
    const ChunkPlan::Write& write = plan.writes[i];
    writes[i] = lists.add(write.end - write.begin,
                          [&](std::int64_t t) { return place(position + write.begin + t); });
  }
  const std::int64_t halo = lists.add(plan.halo, [&](std::int64_t t) { return place(first + t); });
  const std::int64_t own = lists.add(plan.cached, [](std::int64_t t) { return t; });
  const std::int64_t keys =
      lists.add(count, [&](std::int64_t i) { return full ? 0 : begin_of(i) - first; });
  const std::int64_t none = lists.add(count, [](std::int64_t) { return 0; });
  const std::int64_t ends =
      lists.add(count, [&](std::int64_t i) { return std::min(plan.pinned, begin_of(i)); });

  const auto size = static_cast<std::int64_t>(lists.numbers.size());
  plan.numbers = context.memory.empty(Region::activations, DType::i32, {size});
  run(context.stream, Upload{.y = plan.numbers, .x = {lists.numbers.data(), DType::i32, {size}}});
  const auto view = [&](std::int64_t begin, std::int64_t length) {
    return plan.numbers.rows(begin, begin + length);
  };
  for (std::size_t i = 0; i < writes.size(); ++i) {
    plan.writes[i].slots = view(writes[i], plan.writes[i].end - plan.writes[i].begin);
  }
  plan.halo_slots = view(halo, plan.halo);
  plan.pinned_slots = view(own, plan.cached);
  plan.key_begin = view(keys, count);
  plan.pinned_begin = view(none, count);
  plan.pinned_end = view(ends, count);
  return plan;
}

}  // namespace bifocal
