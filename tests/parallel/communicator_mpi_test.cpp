// The MPI communicator's operations against what every rank can work out alone.
#include <bit>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "core/random.h"
#include "parallel/communicator.h"
#include "support/mpi_world.h"

namespace bifocal {

namespace {

constexpr DType kAllTypes[] = {
    DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8};

// What rank `rank` passes: bytes that differ by rank and place.
std::vector<std::uint8_t> payload(int rank, std::int64_t bytes, std::uint64_t stream) {
  std::vector<std::uint8_t> data(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<std::uint8_t>(
        random_bits(static_cast<std::uint64_t>(rank) + 1, stream, i) & 0xffU);
  }
  return data;
}

template <class T>
T convert(double x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_bfloat16(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <class T>
double value_of(T x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return to_float(x);
  } else {
    return static_cast<double>(x);
  }
}

// Numbers of mixed sign and size, so that the order of a sum shows in its last bits.
template <class T>
std::vector<T> numbers(int rank, std::int64_t n) {
  std::vector<T> data;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto index = static_cast<std::uint64_t>(i);
    data.push_back(convert<T>(100.0 * random_normal(7, static_cast<std::uint64_t>(rank), index)));
  }
  return data;
}

template <class T>
TensorView view_of(std::vector<T>& data) {
  return {data.data(), kDTypeOf<T>, {static_cast<std::int64_t>(data.size())}};
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// (start +) x_0 + x_1 + ... in rank order in Wide, of what each rank's numbers<From>() hold at `i`.
template <class Wide, class From>
Wide sum_over_ranks(std::int64_t n, std::int64_t i, int ranks) {
  Wide sum = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto x = static_cast<Wide>(value_of(numbers<From>(rank, n)[static_cast<std::size_t>(i)]));
    sum = rank == 0 ? x : static_cast<Wide>(sum + x);
  }
  return sum;
}

template <class To, class From>
void expect_reduce_scatter() {
  using Wide = std::conditional_t<std::is_same_v<To, double>, double, float>;
  Communicator& world = test_world();
  for (const std::int64_t n : {0, 1, 5}) {
    const std::int64_t whole_size = n * world.size();
    std::vector<From> whole = numbers<From>(world.rank(), whole_size);
    std::vector<To> part(static_cast<std::size_t>(n), convert<To>(0.375));
    std::vector<To> wanted;
    for (std::int64_t i = 0; i < n; ++i) {
      Wide sum = sum_over_ranks<Wide, From>(whole_size, world.rank() * n + i, world.size());
      sum += static_cast<Wide>(0.375);
      wanted.push_back(convert<To>(sum));
    }
    world.start_reduce_scatter(view_of(part), view_of(whole)).wait();
    EXPECT_TRUE(same_bits(part, wanted))
        << name_of(kDTypeOf<From>) << " into " << name_of(kDTypeOf<To>) << ", n = " << n;
  }
}

template <class T, class Wide>
void expect_all_reduce(std::int64_t n) {
  Communicator& world = test_world();
  std::vector<std::vector<T>> inputs;
  inputs.reserve(static_cast<std::size_t>(world.size()));
  for (int rank = 0; rank < world.size(); ++rank) {
    inputs.push_back(numbers<T>(rank, n));
  }
  std::vector<T> wanted;
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    auto sum = static_cast<Wide>(value_of(inputs[0][i]));
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      sum = static_cast<Wide>(sum + static_cast<Wide>(value_of(inputs[rank][i])));
    }
    wanted.push_back(convert<T>(static_cast<double>(sum)));
  }
  std::vector<T> data = inputs[static_cast<std::size_t>(world.rank())];
  world.all_reduce_sum(view_of(data));
  EXPECT_TRUE(same_bits(data, wanted)) << name_of(kDTypeOf<T>) << ", n = " << n;
}

}  // namespace

TEST(MpiCommunicator, GathersEveryTypeInRankOrder) {
  Communicator& world = test_world();
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t n : {0, 1, 7, 3000}) {
      const std::int64_t bytes = n * static_cast<std::int64_t>(size_of(dtype));
      std::vector<std::uint8_t> part = payload(world.rank(), bytes, 1);
      std::vector<std::uint8_t> wanted;
      for (int rank = 0; rank < world.size(); ++rank) {
        const auto theirs = payload(rank, bytes, 1);
        wanted.insert(wanted.end(), theirs.begin(), theirs.end());
      }
      std::vector<std::uint8_t> whole(wanted.size(), 0xee);
      const TensorView target{whole.data(), dtype, {n * world.size()}};
      world.all_gather(target, {part.data(), dtype, {n}});
      EXPECT_EQ(whole, wanted) << name_of(dtype) << ", n = " << n;

      std::fill(whole.begin(), whole.end(), std::uint8_t{0xee});
      const TensorView place = target.rows(world.rank() * n, (world.rank() + 1) * n);
      if (bytes > 0) {
        std::memcpy(place.data, part.data(), part.size());
      }
      world.all_gather(target, place);
      EXPECT_EQ(whole, wanted) << "in place, " << name_of(dtype) << ", n = " << n;
    }
  }
}

TEST(MpiCommunicator, ReduceScatterAddsInRankOrder) {
  expect_reduce_scatter<double, double>();
  expect_reduce_scatter<float, float>();
  expect_reduce_scatter<BFloat16, BFloat16>();
  expect_reduce_scatter<double, float>();
  expect_reduce_scatter<double, BFloat16>();
  expect_reduce_scatter<float, BFloat16>();
}

TEST(MpiCommunicator, AllReduceSumsInRankOrderOnEveryRank) {
  // The larger sizes take the path that cuts the sum over ranks.
  for (const std::int64_t n : {0, 1, 5, 20011, 50021}) {
    expect_all_reduce<double, double>(n);
    expect_all_reduce<float, float>(n);
    expect_all_reduce<BFloat16, float>(n);
    expect_all_reduce<std::int64_t, std::int64_t>(n);
  }
}

TEST(MpiCommunicator, SumsGiveTheSameBitsRunAfterRun) {
  Communicator& world = test_world();
  const std::vector<float> input = numbers<float>(world.rank(), 30000);
  std::vector<float> first = input;
  world.all_reduce_sum(view_of(first));
  for (int run = 0; run < 5; ++run) {
    std::vector<float> again = input;
    world.all_reduce_sum(view_of(again));
    EXPECT_TRUE(same_bits(first, again));
  }
}

TEST(MpiCommunicator, SeveralOperationsMayBeInFlight) {
  Communicator& world = test_world();
  const int ranks = world.size();
  std::vector<float> part_a(4, static_cast<float>(world.rank()));
  std::vector<float> part_b(4, static_cast<float>(world.rank() + 100));
  std::vector<float> whole_a(static_cast<std::size_t>(4 * ranks));
  std::vector<float> whole_b(static_cast<std::size_t>(4 * ranks));
  std::vector<double> sum(3, 0.0);
  std::vector<double> slices(static_cast<std::size_t>(3 * ranks), 1.0);
  Pending a = world.start_all_gather(view_of(whole_a), view_of(part_a));
  Pending b = world.start_all_gather(view_of(whole_b), view_of(part_b));
  Pending c = world.start_reduce_scatter(view_of(sum), view_of(slices));
  c.wait();
  b.wait();
  a.wait();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(whole_a[static_cast<std::size_t>(4 * rank)], static_cast<float>(rank));
    EXPECT_EQ(whole_b[static_cast<std::size_t>(4 * rank)], static_cast<float>(rank + 100));
  }
  EXPECT_EQ(sum, std::vector<double>(3, ranks));
}

TEST(MpiCommunicator, DestroyingAPendingOperationFinishesIt) {
  Communicator& world = test_world();
  std::vector<std::int32_t> part(2, world.rank());
  std::vector<std::int32_t> whole(static_cast<std::size_t>(2 * world.size()), -1);
  { const Pending dropped = world.start_all_gather(view_of(whole), view_of(part)); }
  for (int rank = 0; rank < world.size(); ++rank) {
    EXPECT_EQ(whole[static_cast<std::size_t>(2 * rank + 1)], rank);
  }
}

TEST(MpiCommunicator, ExchangeMatchesMessagesInOrderWithSelfAndEmptyOnes) {
  Communicator& world = test_world();
  const int ranks = world.size();
  // To every rank, itself included: a long message, an empty one and a short one.
  std::vector<std::vector<std::uint8_t>> buffers;
  const auto bytes = [&](int from, int to, int which) {
    return which == 0 ? 100000 + 10 * from + to : which == 1 ? 0 : 3 + from;
  };
  const auto stream = [](int to, int which) {
    return 10 * static_cast<std::uint64_t>(to) + static_cast<std::uint64_t>(which);
  };
  std::vector<RankMessage> sends;
  std::vector<RankMessage> receives;
  buffers.reserve(6 * static_cast<std::size_t>(ranks));
  for (int peer = 0; peer < ranks; ++peer) {
    for (int which = 0; which < 3; ++which) {
      auto& out = buffers.emplace_back(
          payload(world.rank(), bytes(world.rank(), peer, which), stream(peer, which)));
      sends.push_back({peer, view_of(out)});
      auto& in = buffers.emplace_back(static_cast<std::size_t>(bytes(peer, world.rank(), which)),
                                      std::uint8_t{0});
      receives.push_back({peer, view_of(in)});
    }
  }
  for (int run = 0; run < 3; ++run) {
    world.exchange(sends, receives);
    for (std::size_t i = 0; i < receives.size(); ++i) {
      const int peer = receives[i].peer;
      const int which = static_cast<int>(i % 3);
      EXPECT_EQ(buffers[2 * i + 1],
                payload(peer, bytes(peer, world.rank(), which), stream(world.rank(), which)));
      std::fill(buffers[2 * i + 1].begin(), buffers[2 * i + 1].end(), std::uint8_t{0});
    }
  }
}

TEST(MpiCommunicator, ExchangeWithoutMessagesIsAllowed) {
  test_world().exchange({}, {});
}

TEST(MpiCommunicator, AShorterMessageThanWantedIsAnError) {
  Communicator& world = test_world();
  std::vector<float> out(3);
  std::vector<float> in(5);
  const int next = (world.rank() + 1) % world.size();
  const int previous = (world.rank() + world.size() - 1) % world.size();
  EXPECT_THROW(world.exchange({{next, view_of(out)}}, {{previous, view_of(in)}}), Error);
}

TEST(MpiCommunicator, BroadcastsFromEveryRoot) {
  Communicator& world = test_world();
  for (int root = 0; root < world.size(); ++root) {
    std::vector<std::uint8_t> data = payload(world.rank(), 999, 3);
    world.broadcast(view_of(data), root);
    EXPECT_EQ(data, payload(root, 999, 3));
  }
}

TEST(MpiCommunicator, AWrongRootOrPeerIsAnErrorWithTheLibrarysText) {
  Communicator& world = test_world();
  std::vector<float> data(2);
  try {
    world.broadcast(view_of(data), world.size());
    FAIL() << "a root outside the group was accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("MPI_Bcast"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("root"), std::string::npos) << error.what();
  }
  EXPECT_THROW(world.exchange({{world.size(), view_of(data)}}, {}), Error);
}

TEST(MpiCommunicator, SplitGroupsByColorInRankOrder) {
  Communicator& world = test_world();
  const auto group = world.split(world.rank() % 2);
  EXPECT_EQ(group->size(), (world.size() + 1 - world.rank() % 2) / 2);
  EXPECT_EQ(group->rank(), world.rank() / 2);
  std::vector<std::int64_t> sum{world.rank()};
  group->all_reduce_sum(view_of(sum));
  std::int64_t wanted = 0;
  for (int rank = world.rank() % 2; rank < world.size(); rank += 2) {
    wanted += rank;
  }
  EXPECT_EQ(sum[0], wanted);
  EXPECT_THROW(world.split(-1), Error);
}

TEST(MpiCommunicator, RanksOfOneHostShareANode) {
  Communicator& world = test_world();
  const auto node = world.split_node();
  EXPECT_EQ(node->size(), world.size());
  EXPECT_EQ(node->rank(), world.rank());
}

TEST(MpiCommunicator, ChecksTypesAndSizes) {
  Communicator& world = test_world();
  const auto ranks = static_cast<std::size_t>(world.size());
  std::vector<float> part(2);
  std::vector<float> whole(2 * ranks + 1);
  std::vector<double> wide(2 * ranks);
  std::vector<std::int32_t> integers(2 * ranks);
  EXPECT_THROW(world.all_gather(view_of(whole), view_of(part)), Error);
  EXPECT_THROW(world.all_gather(view_of(wide), view_of(part)), Error);
  EXPECT_THROW(world.start_reduce_scatter(view_of(part), view_of(wide)), Error);
  EXPECT_THROW(world.start_reduce_scatter(view_of(integers), view_of(integers)), Error);
  EXPECT_THROW(world.all_reduce_sum(view_of(integers)), Error);
}

TEST(MpiCommunicator, TextsArriveWholeAndInOrder) {
  Communicator& world = test_world();
  const auto text = [](int rank) {
    return std::string(static_cast<std::size_t>(5 * rank), 'x') + std::to_string(rank);
  };
  const std::vector<std::string> texts = gather_texts(world, text(world.rank()));
  ASSERT_EQ(texts.size(), static_cast<std::size_t>(world.size()));
  for (int rank = 0; rank < world.size(); ++rank) {
    EXPECT_EQ(texts[static_cast<std::size_t>(rank)], text(rank));
    EXPECT_EQ(broadcast_text(world, text(world.rank()), rank), text(rank));
  }
}

TEST(RequireAll, TurnsAnErrorOfOneRankIntoTheSameOneOnEvery) {
  Communicator& world = test_world();
  require_all(world, "");
  const int last = world.size() - 1;
  std::string text;
  try {
    require_all(world, world.rank() == last ? "[disk] full" : "");
    FAIL() << "no error";
  } catch (const Error& error) {
    text = error.what();
  }
  const std::string wanted = world.size() == 1 ? "[disk] full"
                                               : "[disk] full (on rank " + std::to_string(last) +
                                                     " of " + std::to_string(last + 1) + ")";
  EXPECT_EQ(text, wanted);
}

TEST(RequireAll, ReportsTheLowestFailingRank) {
  Communicator& world = test_world();
  try {
    require_all(world, "error " + std::to_string(world.rank()));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, 7), "error 0");
  }
}

}  // namespace bifocal
