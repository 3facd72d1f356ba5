// The group of one on the device does what the one on the host does.
#include <vector>

#include <gtest/gtest.h>

#include "cuda/device_tensor.h"
#include "kernels/device_communicator.h"

namespace bifocal::test {

namespace {

class DeviceSelfCommunicatorTest : public ::testing::Test {
 protected:
  CudaStream stream_{choose_device(0)};
  Memory memory_;
  std::unique_ptr<Communicator> self_ =
      make_device_communicator(stream_, memory_, make_self_communicator());

  DeviceTensor device(DType dtype, std::vector<double> values) {
    const auto n = static_cast<std::int64_t>(values.size());
    return on_device({values.data(), DType::f64, {n}}, dtype, 1);
  }
};

using Values = std::vector<double>;

TEST_F(DeviceSelfCommunicatorTest, GathersByCopyOrNotAtAll) {
  const DeviceTensor part = device(DType::bf16, {1, 2, 3});
  const DeviceTensor whole = device(DType::bf16, {0, 0, 0});
  self_->all_gather(whole.view(), part.view());
  EXPECT_EQ(whole.download(stream_), (Values{1, 2, 3}));
  self_->all_gather(part.view(), part.view());
  EXPECT_EQ(part.download(stream_), (Values{1, 2, 3}));
  EXPECT_THROW(self_->all_gather(whole.view(), device(DType::bf16, {1}).view()), Error);
}

TEST_F(DeviceSelfCommunicatorTest, ReduceScatterAdds) {
  const DeviceTensor part = device(DType::f32, {10, 20, 30});
  self_->start_reduce_scatter(part.view(), device(DType::f32, {1, 2, 3}).view()).wait();
  EXPECT_EQ(part.download(stream_), (Values{11, 22, 33}));
  self_->start_reduce_scatter(part.view(), device(DType::bf16, {0.5, 0.25, 1}).view()).wait();
  EXPECT_EQ(part.download(stream_), (Values{11.5, 22.25, 34}));
  EXPECT_THROW(
      self_->start_reduce_scatter(device(DType::bf16, {0}).view(), device(DType::f32, {0}).view()),
      Error);
}

TEST_F(DeviceSelfCommunicatorTest, ExchangeCopiesInOrder) {
  const DeviceTensor a = device(DType::f32, {1, 2});
  const DeviceTensor b = device(DType::f32, {3});
  const DeviceTensor to_a = device(DType::f32, {0, 0});
  const DeviceTensor to_b = device(DType::f32, {0});
  self_->exchange({{0, a.view()}, {0, {}}, {0, b.view()}}, {{0, to_a.view()}, {0, to_b.view()}});
  EXPECT_EQ(to_a.download(stream_), (Values{1, 2}));
  EXPECT_EQ(to_b.download(stream_), (Values{3}));
  EXPECT_THROW(self_->exchange({{0, a.view()}}, {{0, to_b.view()}}), Error);
  EXPECT_THROW(self_->exchange({{0, a.view()}}, {}), Error);
  EXPECT_THROW(self_->exchange({{1, a.view()}}, {{1, to_a.view()}}), Error);
}

TEST_F(DeviceSelfCommunicatorTest, SumsAndSplitsAreTrivialAndHostTensorsWork) {
  const DeviceTensor x = device(DType::f32, {1, 2});
  self_->all_reduce_sum(x.view());
  self_->broadcast(x.view(), 0);
  EXPECT_THROW(self_->broadcast(x.view(), 1), Error);
  EXPECT_EQ(x.download(stream_), (Values{1, 2}));
  const std::unique_ptr<Communicator> again = self_->split(3);
  const DeviceTensor y = device(DType::f32, {0, 0});
  again->all_gather(y.view(), x.view());
  EXPECT_EQ(y.download(stream_), (Values{1, 2}));
  Values host{4, 5};
  Values target(2);
  self_->split_node()->all_gather({target.data(), DType::f64, {2}}, {host.data(), DType::f64, {2}});
  EXPECT_EQ(target, host);
}

}  // namespace

}  // namespace bifocal::test
