// What ranks do together: a few collectives over one group, behind one interface. No arithmetic but
// sums.
//
// All members of a group call the same operations in the same order. start_... returns at once; the
// buffers belong to the operation until Pending::wait(). Sums are formed in a fixed order (on the
// host the order of ranks), so equal inputs give equal bits run after run. Supported element types:
// f64, f32, bf16 (summed in float32), in all_reduce_sum also i64, and for copies (gather,
// broadcast, exchange) every type.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace bifocal {

// An operation in flight. wait() throws what the transport reports; destroying it or assigning to
// it waits too, but drops errors.
class Pending {
 public:
  Pending() = default;

  explicit Pending(std::function<void()> finish) : finish_(std::move(finish)) {}

  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;
  Pending(Pending&& other) noexcept;
  Pending& operator=(Pending&& other) noexcept;
  ~Pending();
  void wait();

 private:
  std::function<void()> finish_;
};

// One message of an exchange. A tensor of no elements is not sent.
struct RankMessage {
  int peer = 0;
  TensorView data;
};

class Communicator {
 public:
  Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  Communicator(Communicator&&) = delete;
  Communicator& operator=(Communicator&&) = delete;
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // whole [size * n] = every rank's part [n] in rank order. part may lie in its place inside whole.
  virtual Pending start_all_gather(const TensorView& whole, const ConstTensorView& part) = 0;

  // part [n] += sum over ranks of their whole [size * n], my n-th. Adds to what part holds.
  // part may have a wider real type than whole, and then sums are formed in that type. whole serves
  // as scratch: its elements are undefined afterwards.
  virtual Pending start_reduce_scatter(const TensorView& part, const TensorView& whole) = 0;

  // Grouped sends and receives; between two ranks, messages match in the order given. A rank may
  // send to itself. Sends and receives must pair up over the group.
  virtual Pending start_exchange(const std::vector<RankMessage>& sends,
                                 const std::vector<RankMessage>& receives) = 0;

  // data = sum over ranks, the same bits everywhere.
  virtual void all_reduce_sum(const TensorView& data) = 0;

  // data of root to all.
  virtual void broadcast(const TensorView& data, int root) = 0;

  virtual void barrier() = 0;

  // The members with the same color, ordered by rank.
  virtual std::unique_ptr<Communicator> split(int color) = 0;

  // The members on the same host, ordered by rank.
  virtual std::unique_ptr<Communicator> split_node() = 0;

  void all_gather(const TensorView& whole, const ConstTensorView& part) {
    start_all_gather(whole, part).wait();
  }

  void exchange(const std::vector<RankMessage>& sends, const std::vector<RankMessage>& receives) {
    start_exchange(sends, receives).wait();
  }
};

// A group of one, which needs no launcher.
std::unique_ptr<Communicator> make_self_communicator();

// Collective: every rank's text, in rank order.
std::vector<std::string> gather_texts(Communicator& group, const std::string& text);

// Collective: root's text.
std::string broadcast_text(Communicator& group, const std::string& text, int root);

// Collective. Returns on every rank if no rank passes an error (a text that is not empty); else
// throws the same Error on every rank: the text of the lowest failing rank, which it names.
void require_all(Communicator& group, const std::string& error);

}  // namespace bifocal
