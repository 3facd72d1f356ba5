// Where sequences stand, slots of caches, recordings and letters, on the CPU.
#include "ops/decode_state.h"

#include <vector>

#include "ops/mailbox.h"
#include "ops/recording.h"
#include "support/op_test.h"

namespace bifocal::test {
namespace {

template <class T>
TensorView view(std::vector<T>& values) {
  return {values.data(), kDTypeOf<T>, {static_cast<std::int64_t>(values.size())}};
}

TEST(DecodeState, AStepGathersItsRowsAndCountsThemAlone) {
  CpuStream cpu;
  Stream stream{&cpu};
  std::vector<std::int32_t> token{10, 11, 12}, position{0, 5, 9}, ids(2), positions(2);
  std::vector<std::int64_t> streams{7, 8, 9}, drawn{0, 3, 4}, row_streams(2), indices(2);
  std::vector<std::int32_t> sequences{2, 0};
  run(stream,
      StepBegin{.ids = view(ids),
                .positions = view(positions),
                .streams = view(row_streams),
                .indices = view(indices),
                .state = {view(token), view(position), view(streams), view(drawn)},
                .sequences = view(sequences)});
  EXPECT_EQ(ids, (std::vector<std::int32_t>{12, 10}));
  EXPECT_EQ(positions, (std::vector<std::int32_t>{9, 0}));
  EXPECT_EQ(row_streams, (std::vector<std::int64_t>{9, 7}));
  EXPECT_EQ(indices, (std::vector<std::int64_t>{4, 0}));
  EXPECT_EQ(position, (std::vector<std::int32_t>{1, 5, 10}));
  EXPECT_EQ(drawn, (std::vector<std::int64_t>{1, 3, 5}));
  ids = {20, 21};
  run(stream, StepEnd{.token = view(token), .ids = view(ids), .sequences = view(sequences)});
  EXPECT_EQ(token, (std::vector<std::int32_t>{21, 11, 20}));
}

TEST(DecodeState, RingsKeepPinnedTokensAndGoRound) {
  CpuStream cpu;
  Stream stream{&cpu};
  std::vector<std::int32_t> positions{0, 1, 2, 5, 6, 7, 10}, places(7), lengths(7);
  CachePlaces op{.places = view(places),
                 .lengths = view(lengths),
                 .positions = view(positions),
                 .window = 5,
                 .pinned = 2};
  run(stream, op);
  EXPECT_EQ(places, (std::vector<std::int32_t>{0, 1, 2, 5, 6, 2, 5}));
  EXPECT_EQ(lengths, (std::vector<std::int32_t>{1, 2, 3, 6, 7, 7, 7}));
  op.window = 0;
  op.pinned = 0;
  run(stream, op);
  EXPECT_EQ(places, positions);
  EXPECT_EQ(lengths, (std::vector<std::int32_t>{1, 2, 3, 6, 7, 8, 11}));
  op.window = -1;
  EXPECT_THROW(run(stream, op), Error);
}

TEST(Recording, QueuesItsWorkAtEveryReplay) {
  CpuStream cpu;
  int runs = 0;
  const std::unique_ptr<Recording> recording = record(cpu, [&] { ++runs; });
  const int before = runs;
  recording->replay();
  recording->replay();
  EXPECT_EQ(runs, before + 2);
}

TEST(Mailbox, HandsOutLettersInTheirOrderAndAsTheyWere) {
  CpuStream cpu;
  const std::unique_ptr<Mailbox> mailbox = make_mailbox(cpu, 2);
  std::vector<std::int32_t> x{1, 2};
  mailbox->post(view(x));
  x = {3, 4};
  mailbox->post(view(x).rows(1, 2));
  EXPECT_EQ(mailbox->take(), (std::vector<std::int32_t>{1, 2}));
  EXPECT_EQ(mailbox->take(), (std::vector<std::int32_t>{4}));
  std::vector<std::int32_t> large(3);
  EXPECT_THROW(mailbox->post(view(large)), Error);
  for (std::size_t i = 0; i < Mailbox::kMost; ++i) {
    mailbox->post(view(x));
  }
  EXPECT_THROW(mailbox->post(view(x)), Error);
}

}  // namespace
}  // namespace bifocal::test
