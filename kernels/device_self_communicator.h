// A group of one whose tensors may lie on the device.
#pragma once

#include "kernels/cuda_stream.h"
#include "parallel/communicator.h"

namespace bifocal {

// `host` is a group of one; it does what concerns host tensors. Copies and sums on the device are
// queued on `compute`, which must outlive the result.
std::unique_ptr<Communicator> make_device_self_communicator(CudaStream& compute,
                                                            std::unique_ptr<Communicator> host);

// The messages that are not empty. Throws unless all lie on the device or all on the host, and
// peers are in [0, ranks).
struct Messages {
  std::vector<RankMessage> sends;
  std::vector<RankMessage> receives;
  bool on_device = false;
};

Messages sorted_messages(const std::vector<RankMessage>& sends,
                         const std::vector<RankMessage>& receives,
                         int ranks);

// Throws unless what `rank` sends to itself has the sizes of what it receives, message by message.
void check_self_messages(const Messages& messages, int rank);

}  // namespace bifocal
