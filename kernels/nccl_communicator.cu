// Collectives as NCCL calls on a stream beside the compute stream.
#include "kernels/cuda_check.h"
#include "kernels/device_communicator.h"
#include "kernels/device_self_communicator.h"
#include "kernels/device_sum.h"
#include "kernels/nccl_communicator.h"
#include "kernels/nccl_group.h"
#include "parallel/collective.h"

namespace bifocal {

namespace {

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return ncclFloat64;
    case DType::f32:
      return ncclFloat32;
    default:
      BIFOCAL_ASSERT(dtype == DType::i64);
      return ncclInt64;
  }
}

// Every rank's `bytes` at `slices` go to the rank whose they are; `arrived` gets theirs in rank
// order.
ncclResult_t all_to_all(ncclComm_t comm,
                        int ranks,
                        const void* slices,
                        void* arrived,
                        std::size_t bytes,
                        cudaStream_t stream) {
  ncclResult_t result = nccl().group_start();
  for (int peer = 0; peer < ranks && result == ncclSuccess; ++peer) {
    const std::size_t offset = static_cast<std::size_t>(peer) * bytes;
    result = nccl().send(
        static_cast<const std::byte*>(slices) + offset, bytes, ncclUint8, peer, comm, stream);
    if (result == ncclSuccess) {
      result = nccl().recv(
          static_cast<std::byte*>(arrived) + offset, bytes, ncclUint8, peer, comm, stream);
    }
  }
  const ncclResult_t ended = nccl().group_end();
  return result == ncclSuccess ? ended : result;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<NcclGroup> group, std::unique_ptr<Communicator> host)
      : group_(std::move(group)),
        host_(std::move(host)),
        rank_(host_->rank()),
        size_(host_->size()) {}

  int rank() const override { return rank_; }

  int size() const override { return size_; }

  Pending start_all_gather(const TensorView& whole, const ConstTensorView& part) override {
    if (!is_on_device(whole.data)) {
      return host_->start_all_gather(whole, part);
    }
    check_all_gather(whole, part, size_);
    require_on_device("all_gather", part.data);
    return start("all_gather", whole.bytes(), {}, [&](cudaStream_t stream) {
      group_->call("ncclAllGather", [&](ncclComm_t comm) {
        return nccl().all_gather(part.data, whole.data, part.bytes(), ncclUint8, comm, stream);
      });
    });
  }

  Pending start_reduce_scatter(const TensorView& part, const TensorView& whole) override {
    if (!is_on_device(whole.data)) {
      return host_->start_reduce_scatter(part, whole);
    }
    check_reduce_scatter(part, whole, size_);
    require_on_device("reduce_scatter", part.data);
    // NCCL would round bfloat16 sums at every step, and it knows no mixed types.
    if (part.dtype != whole.dtype || whole.dtype == DType::bf16) {
      return widen_and_scatter(part, whole);
    }
    const TensorView own =
        whole.reshape({whole.size()}).rows(rank_ * part.size(), (rank_ + 1) * part.size());
    return start("reduce_scatter", whole.bytes(), {}, [&](cudaStream_t stream) {
      group_->call("ncclReduceScatter", [&](ncclComm_t comm) {
        return nccl().reduce_scatter(whole.data,
                                     own.data,
                                     static_cast<std::size_t>(part.size()),
                                     nccl_type(whole.dtype),
                                     ncclSum,
                                     comm,
                                     stream);
      });
      add_slices(stream, part, own.data, whole.dtype, 1);
    });
  }

  Pending start_exchange(const std::vector<RankMessage>& sends,
                         const std::vector<RankMessage>& receives) override {
    const Messages messages = sorted_messages(sends, receives, size_);
    if (!messages.on_device) {
      return host_->start_exchange(sends, receives);
    }
    check_self_messages(messages, rank_);
    std::size_t bytes = 0;
    for (const std::vector<RankMessage>* side : {&messages.sends, &messages.receives}) {
      for (const RankMessage& message : *side) {
        bytes += message.data.bytes();
      }
    }
    return start("exchange", bytes, {}, [&](cudaStream_t stream) {
      group_->call("ncclSend and ncclRecv",
                   [&](ncclComm_t comm) { return send_and_receive(messages, comm, stream); });
    });
  }

  void all_reduce_sum(const TensorView& data) override {
    if (!is_on_device(data.data)) {
      return host_->all_reduce_sum(data);
    }
    check_all_reduce(data);
    constexpr std::size_t kGatherBytes = std::size_t{1} << 20;
    const std::size_t all_bytes = data.bytes() * static_cast<std::size_t>(size_);
    if (data.dtype == DType::bf16 || all_bytes <= kGatherBytes) {
      Tensor scratch = take(data.dtype, data.size() * size_);
      const TensorView slices = scratch;
      start("all_reduce", data.bytes(), std::move(scratch), [&](cudaStream_t stream) {
        group_->call("ncclAllGather", [&](ncclComm_t comm) {
          return nccl().all_gather(data.data, slices.data, data.bytes(), ncclUint8, comm, stream);
        });
        sum_slices(stream, data, slices.data, size_);
      }).wait();
      return;
    }
    start("all_reduce", data.bytes(), {}, [&](cudaStream_t stream) {
      group_->call("ncclAllReduce", [&](ncclComm_t comm) {
        return nccl().all_reduce(data.data,
                                 data.data,
                                 static_cast<std::size_t>(data.size()),
                                 nccl_type(data.dtype),
                                 ncclSum,
                                 comm,
                                 stream);
      });
    }).wait();
  }

  void broadcast(const TensorView& data, int root) override {
    if (!is_on_device(data.data)) {
      return host_->broadcast(data, root);
    }
    BIFOCAL_REQUIRE(
        root >= 0 && root < size_, "[broadcast] wanted root in [0, {}), got {}", size_, root);
    start("broadcast", data.bytes(), {}, [&](cudaStream_t stream) {
      group_->call("ncclBroadcast", [&](ncclComm_t comm) {
        return nccl().broadcast(data.data, data.data, data.bytes(), ncclUint8, root, comm, stream);
      });
    }).wait();
  }

  void barrier() override { host_->barrier(); }

  std::unique_ptr<Communicator> split(int color) override { return over(host_->split(color)); }

  std::unique_ptr<Communicator> split_node() override { return over(host_->split_node()); }

 private:
  // A group of all our members has our order of ranks: it shares our NCCL communicator.
  std::unique_ptr<Communicator> over(std::unique_ptr<Communicator> host) {
    if (host->size() == 1) {
      return make_device_self_communicator(context().compute(), std::move(host));
    }
    std::shared_ptr<NcclGroup> group = group_;
    if (host->size() < size_) {
      group = std::make_shared<NcclGroup>(group_->context(), *host);
    }
    return std::make_unique<NcclCommunicator>(std::move(group), std::move(host));
  }

  NcclContext& context() const { return *group_->context(); }

  Tensor take(DType dtype, std::int64_t elements) {
    return context().memory().empty(Region::communication, dtype, {elements});
  }

  static void require_on_device(const char* where, const void* pointer) {
    BIFOCAL_REQUIRE(pointer == nullptr || is_on_device(pointer),
                    "[{}] wanted both tensors on the device, got one on the host",
                    where);
  }

  // Slices of all ranks, summed here.
  Pending widen_and_scatter(const TensorView& part, const TensorView& whole) {
    Tensor scratch = take(whole.dtype, whole.size());
    const TensorView slices = scratch;
    return start("reduce_scatter", whole.bytes(), std::move(scratch), [&](cudaStream_t stream) {
      group_->call("ncclSend and ncclRecv", [&](ncclComm_t comm) {
        const std::size_t bytes = whole.bytes() / static_cast<std::size_t>(size_);
        return all_to_all(comm, size_, whole.data, slices.data, bytes, stream);
      });
      add_slices(stream, part, slices.data, whole.dtype, size_);
    });
  }

  ncclResult_t send_and_receive(const Messages& messages, ncclComm_t comm, cudaStream_t stream) {
    ncclResult_t result = nccl().group_start();
    for (const RankMessage& message : messages.sends) {
      if (result == ncclSuccess) {
        result = nccl().send(
            message.data.data, message.data.bytes(), ncclUint8, message.peer, comm, stream);
      }
    }
    for (const RankMessage& message : messages.receives) {
      if (result == ncclSuccess) {
        result = nccl().recv(
            message.data.data, message.data.bytes(), ncclUint8, message.peer, comm, stream);
      }
    }
    const ncclResult_t ended = nccl().group_end();
    return result == ncclSuccess ? ended : result;
  }

  // queue(stream) queues the work. Scratch goes back once the compute stream waits for its end:
  // memory is used again in that stream's order.
  template <class Queue>
  Pending start(const char* name, std::size_t bytes, Tensor scratch, const Queue& queue) {
    if (bytes == 0) {
      return {};
    }
    const std::shared_ptr<NcclOperation> operation = context().begin(name, bytes, size_);
    try {
      queue(context().stream());
      context().queued(*operation);
    } catch (...) {
      operation->state = NcclOperation::State::abandoned;
      throw;
    }
    auto held = std::make_shared<Tensor>(std::move(scratch));
    return Pending([group = group_, operation, held] {
      group->context()->join(*operation);
      *held = Tensor();
      group->check(*operation);
    });
  }

  std::shared_ptr<NcclGroup> group_;
  std::unique_ptr<Communicator> host_;
  int rank_;
  int size_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(CudaStream& compute,
                                                     Memory& memory,
                                                     std::unique_ptr<Communicator> host) {
  auto context = std::make_shared<NcclContext>(compute, memory, *host);
  auto group = std::make_shared<NcclGroup>(std::move(context), *host);
  return std::make_unique<NcclCommunicator>(std::move(group), std::move(host));
}

}  // namespace bifocal
