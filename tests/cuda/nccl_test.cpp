// Each operation of the NCCL communicator on the device against the MPI communicator on the host:
// the same bits where nothing is summed, and where sums are in rank order; else to rounding.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "core/random.h"
#include "cuda/gpu_rank.h"

namespace bifocal::test {

namespace {

using Bytes = std::vector<std::uint8_t>;

[[maybe_unused]] const auto* const kEnvironment =
    ::testing::AddGlobalTestEnvironment(std::make_unique<GpuRankEnvironment>().release());

constexpr DType kAllTypes[] = {
    DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8};

Bytes payload(int rank, std::int64_t bytes, std::uint64_t stream) {
  Bytes data(static_cast<std::size_t>(bytes));
  for (std::size_t i = 0; i < data.size(); ++i) {
    const auto seed = static_cast<std::uint64_t>(rank) + 1;
    data[i] = static_cast<std::uint8_t>(random_bits(seed, stream, i / 8) >> (8 * (i % 8)));
  }
  return data;
}

// Numbers of mixed sign and size, so that the order of a sum shows in its last bits.
Bytes numbers(DType dtype, int rank, std::int64_t n) {
  Bytes bytes(static_cast<std::size_t>(n) * size_of(dtype));
  for (std::int64_t i = 0; i < n; ++i) {
    const double x =
        100.0 * random_normal(7, static_cast<std::uint64_t>(rank), static_cast<std::uint64_t>(i));
    std::uint8_t* place = bytes.data() + static_cast<std::size_t>(i) * size_of(dtype);
    const auto put = [&](const auto& value) { std::memcpy(place, &value, sizeof value); };
    switch (dtype) {
      case DType::f64:
        put(x);
        break;
      case DType::f32:
        put(static_cast<float>(x));
        break;
      case DType::bf16:
        put(to_bfloat16(static_cast<float>(x)));
        break;
      default:
        put(static_cast<std::int64_t>(x));
    }
  }
  return bytes;
}

double value_at(DType dtype, const Bytes& bytes, std::int64_t i) {
  const std::uint8_t* place = bytes.data() + static_cast<std::size_t>(i) * size_of(dtype);
  const auto get = [&]<class T>(T value) {
    std::memcpy(&value, place, sizeof value);
    return value;
  };
  switch (dtype) {
    case DType::f64:
      return get(double{});
    case DType::f32:
      return static_cast<double>(get(float{}));
    case DType::bf16:
      return static_cast<double>(to_float(get(BFloat16{})));
    case DType::i64:
      return static_cast<double>(get(std::int64_t{}));
    default:
      return *place;  // for a failure's text: the first byte
  }
}

TensorView view_of(DType dtype, Bytes& bytes) {
  return {bytes.data(), dtype, {static_cast<std::int64_t>(bytes.size() / size_of(dtype))}};
}

// Where bytes differ first, for a failure's text.
std::string compare(DType dtype, const Bytes& got, const Bytes& want) {
  if (got.size() != want.size()) {
    return fmt::format("{} bytes in place of {}", got.size(), want.size());
  }
  for (std::size_t i = 0; i < got.size(); i += size_of(dtype)) {
    if (std::memcmp(got.data() + i, want.data() + i, size_of(dtype)) != 0) {
      const auto element = static_cast<std::int64_t>(i / size_of(dtype));
      return fmt::format("{} element {} of {}: got {}, want {}",
                         name_of(dtype),
                         element,
                         got.size() / size_of(dtype),
                         value_at(dtype, got, element),
                         value_at(dtype, want, element));
    }
  }
  return {};
}

// Sums of `terms` numbers of about 100 in another order: each addition rounds by at most epsilon /
// 2 of a partial sum, and so does what the host's sum is off by.
void expect_sums(DType dtype, const Bytes& got, const Bytes& want, int terms) {
  if (test_world().size() <= 2 || dtype == DType::bf16 || dtype == DType::i64) {
    EXPECT_EQ(compare(dtype, got, want), "");
    return;
  }
  const double epsilon = dtype == DType::f32 ? std::numeric_limits<float>::epsilon()
                                             : std::numeric_limits<double>::epsilon();
  ASSERT_EQ(got.size(), want.size());
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(got.size() / size_of(dtype)); ++i) {
    ASSERT_NEAR(value_at(dtype, got, i), value_at(dtype, want, i), epsilon * terms * 600.0)
        << name_of(dtype) << " element " << i;
  }
}

class Nccl : public GpuRanksTest {};

TEST_F(Nccl, GathersEveryType) {
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t n : {0, 1, 7, 3000, 1 << 20}) {
      SCOPED_TRACE(fmt::format("{}, n = {}", name_of(dtype), n));
      const std::int64_t bytes = n * static_cast<std::int64_t>(size_of(dtype));
      Bytes part = payload(world().rank(), bytes, 1);
      Bytes want(part.size() * static_cast<std::size_t>(world().size()));
      test_world().all_gather(view_of(dtype, want), view_of(dtype, part));

      const Tensor device_part = gpu().on_device(dtype, part);
      const Tensor whole = gpu().empty(dtype, n * world().size());
      world().all_gather(whole, device_part);
      EXPECT_EQ(compare(dtype, gpu().download(whole), want), "");

      const Tensor again = gpu().empty(dtype, n * world().size());
      const TensorView place = again.rows(world().rank() * n, (world().rank() + 1) * n);
      gpu().upload(place, part.data());
      world().all_gather(again, place);
      EXPECT_EQ(compare(dtype, gpu().download(again), want), "") << "in place";
    }
  }
}

TEST_F(Nccl, ReduceScatterAddsToWhatPartHolds) {
  constexpr std::pair<DType, DType> kTypes[] = {{DType::f64, DType::f64},
                                                {DType::f32, DType::f32},
                                                {DType::bf16, DType::bf16},
                                                {DType::f64, DType::f32},
                                                {DType::f64, DType::bf16},
                                                {DType::f32, DType::bf16}};
  const int rank = world().rank();
  for (const auto& [to, from] : kTypes) {
    for (const std::int64_t n : {0, 1, 5, 100003}) {
      SCOPED_TRACE(fmt::format("{} into {}, n = {}", name_of(from), name_of(to), n));
      Bytes whole = numbers(from, rank, n * world().size());
      Bytes want = numbers(to, rank + 50, n);
      // One element past the start of a block, as a view would lie.
      const Tensor block = gpu().empty(to, n + 1);
      const TensorView part = block.rows(1, n + 1);
      gpu().upload(part, want.data());
      const Tensor device_whole = gpu().on_device(from, whole);
      world().start_reduce_scatter(part, device_whole).wait();
      test_world().start_reduce_scatter(view_of(to, want), view_of(from, whole)).wait();
      expect_sums(to, gpu().download(part), want, world().size() + 1);
    }
  }
}

TEST_F(Nccl, AllReduceSumsShortAndLong) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i64}) {
    for (const std::int64_t n : {0, 1, 5, 20011, 400007}) {
      SCOPED_TRACE(fmt::format("{}, n = {}", name_of(dtype), n));
      Bytes want = numbers(dtype, world().rank(), n);
      const Tensor data = gpu().on_device(dtype, want);
      world().all_reduce_sum(data);
      test_world().all_reduce_sum(view_of(dtype, want));
      expect_sums(dtype, gpu().download(data), want, world().size());
    }
  }
}

TEST_F(Nccl, SumsGiveTheSameBitsRunAfterRun) {
  constexpr std::int64_t kElements = 1000003;
  const Bytes values = numbers(DType::f32, world().rank(), kElements * world().size());
  Bytes first;
  for (int run = 0; run < 100; ++run) {
    const Tensor whole = gpu().on_device(DType::f32, values);  // the operation writes over it
    const Tensor part = gpu().memory().zeros(Region::gradients, DType::f32, {kElements});
    world().start_reduce_scatter(part, whole).wait();
    const Bytes sums = gpu().download(part);
    if (run == 0) {
      first = sums;
    }
    ASSERT_EQ(compare(DType::f32, sums, first), "") << "run " << run;
  }
}

TEST_F(Nccl, BroadcastsFromEveryRoot) {
  for (int root = 0; root < world().size(); ++root) {
    const Tensor data = gpu().on_device(DType::u8, payload(world().rank(), 99999, 3));
    world().broadcast(data, root);
    EXPECT_EQ(compare(DType::u8, gpu().download(data), payload(root, 99999, 3)), "");
  }
}

// To every rank, itself included: a long message, an empty one and a short one; sizes differ by
// sender and receiver.
TEST_F(Nccl, ExchangeMatchesMessagesInOrderWithSelfAndEmptyOnes) {
  const auto bytes = [](int from, int to, int which) -> std::int64_t {
    return which == 0 ? 1000000 + 1000 * from + 10 * to : which == 1 ? 0 : 3 + from;
  };
  const auto stream = [](int to, int which) { return static_cast<std::uint64_t>(10 * to + which); };
  const int rank = world().rank();
  for (int run = 0; run < 3; ++run) {
    std::vector<Tensor> buffers;
    std::vector<RankMessage> sends;
    std::vector<RankMessage> receives;
    for (int peer = 0; peer < world().size(); ++peer) {
      for (int which = 0; which < 3; ++which) {
        buffers.push_back(gpu().on_device(
            DType::u8, payload(rank, bytes(rank, peer, which), stream(peer, which))));
        sends.push_back({peer, buffers.back()});
        buffers.push_back(gpu().empty(DType::u8, bytes(peer, rank, which)));
        receives.push_back({peer, buffers.back()});
      }
    }
    world().exchange(sends, receives);
    for (std::size_t i = 0; i < receives.size(); ++i) {
      const int peer = receives[i].peer;
      const int which = static_cast<int>(i % 3);
      const Bytes want = payload(peer, bytes(peer, rank, which), stream(rank, which));
      EXPECT_EQ(compare(DType::u8, gpu().download(receives[i].data), want), "")
          << "from rank " << peer << ", message " << which;
    }
  }
  world().exchange({}, {});
}

// The first rank sends, the last receives, those between do neither.
TEST_F(Nccl, ExchangeMayBeOneSided) {
  const int last = world().size() - 1;
  if (last == 0) {
    return;
  }
  const Tensor data = gpu().on_device(DType::u8, payload(world().rank(), 5000, 4));
  std::vector<RankMessage> sends;
  std::vector<RankMessage> receives;
  if (world().rank() == 0) {
    sends.push_back({last, data});
  } else if (world().rank() == last) {
    receives.push_back({0, data});
  }
  world().exchange(sends, receives);
  const int from = world().rank() == last ? 0 : world().rank();
  EXPECT_EQ(compare(DType::u8, gpu().download(data), payload(from, 5000, 4)), "");
}

TEST_F(Nccl, MessagesMayBeLargerThanTwoGiB) {
  constexpr std::int64_t kBytes = (std::int64_t{5} << 29) + 12345;  // 2.5 GiB
  const int next = (world().rank() + 1) % world().size();
  const int previous = (world().rank() + world().size() - 1) % world().size();
  const Tensor out = gpu().empty(DType::u8, kBytes);
  const Tensor in = gpu().memory().zeros(Region::activations, DType::u8, {kBytes});
  const std::int64_t cut = std::int64_t{1} << 31;
  const auto fill = [&](std::int64_t begin, std::int64_t end, int value) {
    const TensorView rows = out.rows(begin, end);
    BIFOCAL_CUDA(cudaMemsetAsync(rows.data, value, rows.bytes(), gpu().stream().handle()));
  };
  fill(0, cut, 10 + world().rank());
  fill(cut, kBytes, 90 + world().rank());
  world().exchange({{next, out}}, {{previous, in}});
  const Bytes got = gpu().download(in);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const int want = (i < static_cast<std::size_t>(cut) ? 10 : 90) + previous;
    wrong += got[i] == want ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0U);
}

// The operation starts after what was queued before it, what is queued after wait() starts after
// the operation, and the CPU waits for neither: buffers are filled late and overwritten at once.
TEST_F(Nccl, WaitOrdersTheComputeStreamAndNotTheCpu) {
  constexpr std::int64_t kBytes = 1 << 24;
  const Tensor part = gpu().empty(DType::u8, kBytes);
  const Tensor whole = gpu().empty(DType::u8, kBytes * world().size());
  const Tensor copy = gpu().empty(DType::u8, kBytes * world().size());
  world().all_gather(whole, part);  // ranks connect
  const cudaStream_t stream = gpu().stream().handle();
  for (int run = 0; run < 10; ++run) {
    const Tensor source = gpu().on_device(DType::u8, payload(world().rank() + 2 * run, kBytes, 5));
    gpu().keep_busy(100);
    BIFOCAL_CUDA(cudaMemcpyAsync(
        part.view().data, source.view().data, kBytes, cudaMemcpyDeviceToDevice, stream));
    Pending gather = world().start_all_gather(whole, part);
    gather.wait();
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << "wait() waited on the CPU";
    BIFOCAL_CUDA(cudaMemsetAsync(part.view().data, 0, kBytes, stream));
    BIFOCAL_CUDA(cudaMemcpyAsync(copy.view().data,
                                 whole.view().data,
                                 static_cast<std::size_t>(whole.size()),
                                 cudaMemcpyDeviceToDevice,
                                 stream));
    BIFOCAL_CUDA(
        cudaMemsetAsync(whole.view().data, 0, static_cast<std::size_t>(whole.size()), stream));
    for (int rank = 0; rank < world().size(); ++rank) {
      const Bytes got = gpu().download(copy.rows(rank * kBytes, (rank + 1) * kBytes));
      ASSERT_EQ(compare(DType::u8, got, payload(rank + 2 * run, kBytes, 5)), "")
          << "run " << run << ", part of rank " << rank;
    }
  }
}

// Scratch of a reduction that widens is not used again before the reduction has read it.
TEST_F(Nccl, ScratchBelongsToTheOperationUntilItsWait) {
  constexpr std::int64_t kElements = 1 << 22;
  const Bytes values = numbers(DType::bf16, world().rank(), kElements * world().size());
  Bytes want;
  for (int run = 0; run < 10; ++run) {
    const Tensor whole = gpu().on_device(DType::bf16, values);
    const Tensor part = gpu().memory().zeros(Region::gradients, DType::f32, {kElements});
    Pending reduction = world().start_reduce_scatter(part, whole);
    {
      const Tensor other = gpu().empty(DType::f32, kElements);
      BIFOCAL_CUDA(
          cudaMemsetAsync(other.view().data, 0xff, other.view().bytes(), gpu().stream().handle()));
    }
    reduction.wait();
    {
      const Tensor other = gpu().empty(DType::f32, kElements);
      BIFOCAL_CUDA(
          cudaMemsetAsync(other.view().data, 0xff, other.view().bytes(), gpu().stream().handle()));
    }
    const Bytes got = gpu().download(part);
    if (run == 0) {
      want = got;
    }
    ASSERT_EQ(compare(DType::f32, got, want), "") << "run " << run;
  }
  EXPECT_EQ(gpu().memory().current_bytes(Region::communication), 0U);
}

TEST_F(Nccl, SeveralOperationsMayBeInFlightAndOneMayBeDropped) {
  const int rank = world().rank();
  const Tensor a = gpu().on_device(DType::u8, payload(rank, 4096, 6));
  const Tensor b = gpu().on_device(DType::u8, payload(rank, 1 << 22, 7));
  const Tensor whole_a = gpu().empty(DType::u8, 4096 * world().size());
  const Tensor whole_b = gpu().empty(DType::u8, (1 << 22) * world().size());
  const Tensor whole_c = gpu().empty(DType::u8, 4096 * world().size());
  Pending second;
  Pending first = world().start_all_gather(whole_a, a);
  second = world().start_all_gather(whole_b, b);
  { const Pending dropped = world().start_all_gather(whole_c, a); }
  second.wait();
  first.wait();
  first.wait();  // once more does no harm
  for (int from = 0; from < world().size(); ++from) {
    const Bytes want_a = payload(from, 4096, 6);
    EXPECT_EQ(
        compare(DType::u8, gpu().download(whole_a.rows(from * 4096, (from + 1) * 4096)), want_a),
        "");
    EXPECT_EQ(
        compare(DType::u8, gpu().download(whole_c.rows(from * 4096, (from + 1) * 4096)), want_a),
        "");
    const std::int64_t n = 1 << 22;
    EXPECT_EQ(
        compare(
            DType::u8, gpu().download(whole_b.rows(from * n, (from + 1) * n)), payload(from, n, 7)),
        "");
  }
}

TEST_F(Nccl, HostTensorsGoByMpi) {
  std::vector<double> sums{1.0, static_cast<double>(world().rank())};
  world().all_reduce_sum({sums.data(), DType::f64, {2}});
  const int ranks = world().size();
  EXPECT_EQ(sums, (std::vector<double>{1.0 * ranks, 0.5 * ranks * (ranks - 1)}));
  std::int64_t part = world().rank() + 1;
  std::vector<std::int64_t> whole(static_cast<std::size_t>(ranks));
  world().all_gather({whole.data(), DType::i64, {ranks}}, {&part, DType::i64, {1}});
  EXPECT_EQ(whole.back(), ranks);
  EXPECT_EQ(gather_texts(world(), fmt::format("rank {}", world().rank())).back(),
            fmt::format("rank {}", ranks - 1));
  world().barrier();
}

TEST_F(Nccl, SplitGroupsWork) {
  const auto all = world().split(0);
  ASSERT_EQ(all->size(), world().size());
  const auto node = world().split_node();
  ASSERT_EQ(node->size(), world().size());
  const auto alone = world().split(world().rank());
  ASSERT_EQ(alone->size(), 1);
  const auto parity = world().split(world().rank() % 2);
  for (Communicator* group : {all.get(), node.get(), alone.get(), parity.get()}) {
    const Bytes mine = payload(world().rank(), 1000, 8);
    const Tensor part = gpu().on_device(DType::u8, mine);
    const Tensor whole = gpu().empty(DType::u8, 1000 * group->size());
    group->all_gather(whole, part);
    const std::int64_t place = group->rank();
    EXPECT_EQ(
        compare(DType::u8, gpu().download(whole.rows(1000 * place, 1000 * (place + 1))), mine), "");
    const Tensor one = gpu().on_device(DType::i64, numbers(DType::i64, 0, 3));
    group->all_reduce_sum(one);
    EXPECT_EQ(value_at(DType::i64, gpu().download(one), 1),
              group->size() * value_at(DType::i64, numbers(DType::i64, 0, 3), 1));
  }
}

TEST_F(Nccl, RefusesWhatDoesNotFitAndGoesOn) {
  const int ranks = world().size();
  const Tensor part = gpu().empty(DType::f32, 2);
  const Tensor longer = gpu().empty(DType::f32, 2 * ranks + 1);
  const Tensor wide = gpu().empty(DType::f64, 2 * ranks);
  const Tensor integers = gpu().empty(DType::i32, 2 * ranks);
  EXPECT_THROW(world().all_gather(longer, part), Error);
  EXPECT_THROW(world().all_gather(wide, part), Error);
  EXPECT_THROW(world().start_reduce_scatter(part, longer), Error);
  EXPECT_THROW(world().start_reduce_scatter(part, wide), Error);
  EXPECT_THROW(world().start_reduce_scatter(integers, integers), Error);
  EXPECT_THROW(world().all_reduce_sum(integers), Error);
  EXPECT_THROW(world().broadcast(part, ranks), Error);
  EXPECT_THROW(world().exchange({{ranks, part}}, {}), Error);
  EXPECT_THROW(world().exchange({{-1, part}}, {}), Error);
  EXPECT_THROW(world().split(-1), Error);
  const int rank = world().rank();
  EXPECT_THROW(world().exchange({{rank, part}}, {{rank, longer}}), Error);
  EXPECT_THROW(world().exchange({{rank, part}}, {}), Error);
  std::vector<float> host(2);
  const TensorView on_host{host.data(), DType::f32, {2}};
  EXPECT_THROW(world().exchange({{rank, part}}, {{rank, on_host}}), Error);
  const Tensor whole = gpu().empty(DType::f32, 2 * ranks);
  EXPECT_THROW(world().all_gather(whole, on_host), Error);
  gpu().upload(part, numbers(DType::f32, rank, 2).data());
  world().all_gather(whole, part);
  EXPECT_EQ(compare(DType::f32,
                    gpu().download(whole.rows(2 * rank, 2 * rank + 2)),
                    numbers(DType::f32, rank, 2)),
            "");
}

// Not a check of a bound: a table of what a step sends, for docs/results.
TEST_F(Nccl, SpeedOfWhatAStepSends) {
  struct Case {
    const char* name;
    std::int64_t bytes;  // of whole, or of one message
  };

  constexpr Case kGathers[] = {{"all_gather, weights of a layer", 202 << 20},
                               {"all_gather, mLSTM states", 2 * 528448}};
  constexpr Case kReductions[] = {{"reduce_scatter, gradients of a layer", 404 << 20}};
  constexpr Case kExchanges[] = {{"exchange, halo of W 448", 1792 << 10},
                                 {"exchange, hidden states", 100 << 20}};
  const int ranks = world().size();
  const auto measure = [&](const char* name, double sent, const auto& start) {
    constexpr int kRuns = 20;
    for (int run = 0; run < 3; ++run) {
      start().wait();
    }
    gpu().stream().synchronize();
    test_world().barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int run = 0; run < kRuns; ++run) {
      start().wait();
    }
    const auto queued = std::chrono::steady_clock::now();
    gpu().stream().synchronize();
    const std::chrono::duration<double> host = queued - begin;
    const std::chrono::duration<double> all = std::chrono::steady_clock::now() - begin;
    if (world().rank() == 0) {
      std::printf("%-40s %10.3f MB sent a rank %9.3f ms %8.1f GB/s, CPU %6.1f us a call\n",
                  name,
                  sent / 1e6,
                  1e3 * all.count() / kRuns,
                  sent * kRuns / all.count() / 1e9,
                  1e6 * host.count() / kRuns);
    }
    EXPECT_GT(all.count(), 0.0);
  };
  for (const auto& [name, bytes] : kGathers) {
    const Tensor whole = gpu().empty(DType::u8, bytes / ranks * ranks);
    const TensorView part =
        whole.rows(world().rank() * (bytes / ranks), (world().rank() + 1) * (bytes / ranks));
    measure(name, static_cast<double>(bytes) / ranks * (ranks - 1), [&] {
      return world().start_all_gather(whole, part);
    });
  }
  for (const auto& [name, bytes] : kReductions) {
    const std::int64_t n = bytes / 4 / ranks;
    const Tensor whole = gpu().memory().zeros(Region::gradients, DType::f32, {n * ranks});
    const Tensor part = gpu().memory().zeros(Region::gradients, DType::f32, {n});
    measure(name, static_cast<double>(bytes) / ranks * (ranks - 1), [&] {
      return world().start_reduce_scatter(part, whole);
    });
  }
  const int next = (world().rank() + 1) % ranks;
  const int previous = (world().rank() + ranks - 1) % ranks;
  for (const auto& [name, bytes] : kExchanges) {
    const Tensor out = gpu().empty(DType::u8, bytes);
    const Tensor in = gpu().empty(DType::u8, bytes);
    measure(name, static_cast<double>(bytes), [&] {
      return world().start_exchange({{next, out}}, {{previous, in}});
    });
  }
}

}  // namespace

}  // namespace bifocal::test
