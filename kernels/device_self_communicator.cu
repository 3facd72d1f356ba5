// Copies on one device in place of messages.
#include "kernels/cuda_check.h"
#include "kernels/device_communicator.h"
#include "kernels/device_self_communicator.h"
#include "kernels/device_sum.h"
#include "parallel/collective.h"

namespace bifocal {

namespace {

class DeviceSelfCommunicator final : public Communicator {
 public:
  DeviceSelfCommunicator(CudaStream& compute, std::unique_ptr<Communicator> host)
      : compute_(&compute), host_(std::move(host)) {
    BIFOCAL_ASSERT(host_->size() == 1);
  }

  int rank() const override { return 0; }

  int size() const override { return 1; }

  Pending start_all_gather(const TensorView& whole, const ConstTensorView& part) override {
    if (!is_on_device(whole.data)) {
      return host_->start_all_gather(whole, part);
    }
    check_all_gather(whole, part, 1);
    copy(whole.data, part.data, whole.bytes());
    return {};
  }

  Pending start_reduce_scatter(const TensorView& part, const TensorView& whole) override {
    if (!is_on_device(part.data)) {
      return host_->start_reduce_scatter(part, whole);
    }
    check_reduce_scatter(part, whole, 1);
    add_slices(compute_->handle(), part, whole.data, whole.dtype, 1);
    return {};
  }

  Pending start_exchange(const std::vector<RankMessage>& sends,
                         const std::vector<RankMessage>& receives) override {
    const Messages messages = sorted_messages(sends, receives, 1);
    if (!messages.on_device) {
      return host_->start_exchange(sends, receives);
    }
    check_self_messages(messages, 0);
    for (std::size_t i = 0; i < messages.sends.size(); ++i) {
      const TensorView& from = messages.sends[i].data;
      copy(messages.receives[i].data.data, from.data, from.bytes());
    }
    return {};
  }

  void all_reduce_sum(const TensorView& data) override { check_all_reduce(data); }

  void broadcast(const TensorView& data, int root) override { host_->broadcast(data, root); }

  void barrier() override { host_->barrier(); }

  std::unique_ptr<Communicator> split(int color) override {
    return std::make_unique<DeviceSelfCommunicator>(*compute_, host_->split(color));
  }

  std::unique_ptr<Communicator> split_node() override {
    return std::make_unique<DeviceSelfCommunicator>(*compute_, host_->split_node());
  }

 private:
  void copy(void* target, const void* source, std::size_t bytes) {
    if (bytes > 0 && target != source) {
      BIFOCAL_CUDA(
          cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, compute_->handle()));
    }
  }

  CudaStream* compute_;
  std::unique_ptr<Communicator> host_;
};

std::vector<RankMessage> non_empty(const std::vector<RankMessage>& messages, int ranks) {
  std::vector<RankMessage> kept;
  for (const RankMessage& message : messages) {
    BIFOCAL_REQUIRE(message.peer >= 0 && message.peer < ranks,
                    "[exchange] wanted peers in [0, {}), got {}",
                    ranks,
                    message.peer);
    if (message.data.bytes() > 0) {
      kept.push_back(message);
    }
  }
  return kept;
}

std::vector<std::size_t> sizes_with(const std::vector<RankMessage>& messages, int peer) {
  std::vector<std::size_t> sizes;
  for (const RankMessage& message : messages) {
    if (message.peer == peer) {
      sizes.push_back(message.data.bytes());
    }
  }
  return sizes;
}

}  // namespace

std::unique_ptr<Communicator> make_device_self_communicator(CudaStream& compute,
                                                            std::unique_ptr<Communicator> host) {
  return std::make_unique<DeviceSelfCommunicator>(compute, std::move(host));
}

Messages sorted_messages(const std::vector<RankMessage>& sends,
                         const std::vector<RankMessage>& receives,
                         int ranks) {
  Messages messages{.sends = non_empty(sends, ranks), .receives = non_empty(receives, ranks)};
  std::size_t on_device = 0;
  for (const std::vector<RankMessage>* side : {&messages.sends, &messages.receives}) {
    for (const RankMessage& message : *side) {
      on_device += is_on_device(message.data.data) ? 1 : 0;
    }
  }
  const std::size_t all = messages.sends.size() + messages.receives.size();
  BIFOCAL_REQUIRE(on_device == 0 || on_device == all,
                  "[exchange] wanted all messages on the device or all on the host, got {} of {} "
                  "on the device: exchange them apart",
                  on_device,
                  all);
  messages.on_device = on_device > 0;
  return messages;
}

void check_self_messages(const Messages& messages, int rank) {
  const std::vector<std::size_t> out = sizes_with(messages.sends, rank);
  const std::vector<std::size_t> in = sizes_with(messages.receives, rank);
  BIFOCAL_REQUIRE(out.size() == in.size(),
                  "[exchange] wanted as many receives as sends of rank {} with itself, got {} "
                  "sends and {} receives",
                  rank,
                  out.size(),
                  in.size());
  for (std::size_t i = 0; i < out.size(); ++i) {
    BIFOCAL_REQUIRE(out[i] == in[i],
                    "[exchange] message {} of rank {} to itself: wanted {} bytes, got {}",
                    i,
                    rank,
                    in[i],
                    out[i]);
  }
}

}  // namespace bifocal
