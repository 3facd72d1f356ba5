// Operations in flight, the group of one, and agreement on errors.
#include "parallel/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "parallel/collective.h"

namespace bifocal {

namespace {

// An operation that nobody waits for any more must still end before its buffers go. Its error has
// no one left to go to, and a destructor must not throw.
void finish_quietly(std::function<void()>& finish) noexcept {
  if (!finish) {
    return;
  }
  try {
    std::exchange(finish, nullptr)();
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }

  int size() const override { return 1; }

  Pending start_all_gather(const TensorView& whole, const ConstTensorView& part) override {
    check_all_gather(whole, part, 1);
    if (whole.size() > 0 && whole.data != part.data) {
      std::memcpy(whole.data, part.data, whole.bytes());
    }
    return {};
  }

  Pending start_reduce_scatter(const TensorView& part, const TensorView& whole) override {
    check_reduce_scatter(part, whole, 1);
    add_in_rank_order(part, whole.data, whole.dtype, 1);
    return {};
  }

  Pending start_exchange(const std::vector<RankMessage>& sends,
                         const std::vector<RankMessage>& receives) override {
    const std::vector<RankMessage> out = non_empty(sends);
    const std::vector<RankMessage> in = non_empty(receives);
    BIFOCAL_REQUIRE(out.size() == in.size(),
                    "[exchange] wanted as many receives as sends, got {} sends and {} receives",
                    out.size(),
                    in.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      BIFOCAL_REQUIRE(out[i].data.bytes() == in[i].data.bytes(),
                      "[exchange] message {} of rank 0 to itself: wanted {} bytes, got {}",
                      i,
                      in[i].data.bytes(),
                      out[i].data.bytes());
      std::memmove(in[i].data.data, out[i].data.data, out[i].data.bytes());
    }
    return {};
  }

  void all_reduce_sum(const TensorView& data) override { check_all_reduce(data); }

  void broadcast(const TensorView& /*data*/, int root) override {
    BIFOCAL_REQUIRE(root == 0, "[broadcast] wanted root in [0, 1), got {}", root);
  }

  void barrier() override {}

  std::unique_ptr<Communicator> split(int color) override {
    BIFOCAL_REQUIRE(color >= 0, "[split] wanted a color of at least 0, got {}", color);
    return make_self_communicator();
  }

  std::unique_ptr<Communicator> split_node() override { return make_self_communicator(); }

 private:
  static std::vector<RankMessage> non_empty(const std::vector<RankMessage>& messages) {
    std::vector<RankMessage> kept;
    for (const RankMessage& message : messages) {
      BIFOCAL_REQUIRE(
          message.peer == 0, "[exchange] wanted a peer in [0, 1), got {}", message.peer);
      if (message.data.size() > 0) {
        kept.push_back(message);
      }
    }
    return kept;
  }
};

}  // namespace

Pending::Pending(Pending&& other) noexcept : finish_(std::exchange(other.finish_, nullptr)) {}

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this != &other) {
    finish_quietly(finish_);
    finish_ = std::exchange(other.finish_, nullptr);
  }
  return *this;
}

Pending::~Pending() {
  finish_quietly(finish_);
}

void Pending::wait() {
  if (finish_) {
    std::exchange(finish_, nullptr)();
  }
}

std::unique_ptr<Communicator> make_self_communicator() {
  return std::make_unique<SelfCommunicator>();
}

std::vector<std::string> gather_texts(Communicator& group, const std::string& text) {
  const auto ranks = static_cast<std::size_t>(group.size());
  std::vector<std::int64_t> lengths(ranks);
  auto length = static_cast<std::int64_t>(text.size());
  group.all_gather({lengths.data(), DType::i64, {group.size()}}, {&length, DType::i64, {1}});
  // Gathers want parts of one size.
  const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = text;
  padded.resize(static_cast<std::size_t>(longest));
  std::string whole(ranks * padded.size(), '\0');
  group.all_gather({whole.data(), DType::u8, {group.size() * longest}},
                   {padded.data(), DType::u8, {longest}});
  std::vector<std::string> texts;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    texts.push_back(whole.substr(rank * padded.size(), static_cast<std::size_t>(lengths[rank])));
  }
  return texts;
}

std::string broadcast_text(Communicator& group, const std::string& text, int root) {
  auto length = static_cast<std::int64_t>(text.size());
  group.broadcast({&length, DType::i64, {1}}, root);
  std::string received = text;
  received.resize(static_cast<std::size_t>(length));
  group.broadcast({received.data(), DType::u8, {length}}, root);
  return received;
}

void require_all(Communicator& group, const std::string& error) {
  if (group.size() == 1) {
    BIFOCAL_REQUIRE(error.empty(), "{}", error);
    return;
  }
  std::vector<std::int64_t> failed(static_cast<std::size_t>(group.size()));
  std::int64_t failed_here = error.empty() ? 0 : 1;
  group.all_gather({failed.data(), DType::i64, {group.size()}}, {&failed_here, DType::i64, {1}});
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first != failed.end()) {
    const auto rank = static_cast<int>(first - failed.begin());
    fail("{} (on rank {} of {})", broadcast_text(group, error, rank), rank, group.size());
  }
}

}  // namespace bifocal
