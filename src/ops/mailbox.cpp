// Letters that have arrived when they are posted.
#include "ops/mailbox.h"

#include <deque>

#include "core/error.h"

namespace bifocal {

namespace {

class CpuMailbox : public Mailbox {
 public:
  explicit CpuMailbox(std::int64_t most_elements) : most_elements_(most_elements) {}

  bool is_behind() const override { return false; }

  void post(const ConstTensorView& x) override {
    BIFOCAL_REQUIRE(x.size() <= most_elements_ && letters_.size() < kMost,
                    "[mailbox] wanted at most {} elements and {} letters, got {} and one more than "
                    "{}: take letters, or make a larger mailbox",
                    most_elements_,
                    kMost,
                    x.size(),
                    letters_.size());
    const auto* values = x.as<std::int32_t>();
    letters_.emplace_back(values, values + x.size());
  }

  std::vector<std::int32_t> take() override {
    BIFOCAL_ASSERT(!letters_.empty());
    std::vector<std::int32_t> letter = std::move(letters_.front());
    letters_.pop_front();
    return letter;
  }

 private:
  std::int64_t most_elements_;
  std::deque<std::vector<std::int32_t>> letters_;
};

}  // namespace

std::unique_ptr<Mailbox> make_mailbox(CpuStream&, std::int64_t most_elements) {
  return std::make_unique<CpuMailbox>(most_elements);
}

}  // namespace bifocal
