// Generation on the device: the forward pass of the CPU in double, and recorded steps against steps
// one by one.
#include "generate/generator.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include <gtest/gtest.h>

#include "parallel/backend.h"
#include "support/device_values.h"
#include "support/speaker.h"

namespace bifocal::test {
namespace {

class DecodeGenerator : public testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = make_cuda_backend(0, 0);
  std::unique_ptr<Communicator> group_ = backend_->communicator(make_self_communicator());
};

// |got - want| over |want|, as vectors.
double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(error / size);
}

// A prompt in chunks and tokens after it, past every window, in models of every kind. float32:
// sums of some hundred terms in another order through three layers. bfloat16: its 2^-9 at each of
// some twenty stores.
TEST_F(DecodeGenerator, IsTheForwardPassOfTheHost) {
  constexpr std::size_t kPrompt = 40;
  constexpr std::int64_t kTokens = 100;
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(describe_all(config));
    Speaker host(config);
    const std::vector<std::int32_t> ids = random_ids(kTokens, 3);
    const Tensor want = host.forward(ids);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(name_of(dtype));
      const double bound = dtype == DType::f32 ? 1e-4 : 0.1;
      Device device(dtype, *backend_);
      TinyModel model(device.context(), config, *group_);
      Context context = device.context();
      Generator generator(context, model.decoder(), 2);
      const auto error_at = [&](const ConstTensorView& logits, std::int64_t token) {
        return relative_error(values_of(context, logits), to_doubles(want.rows(token, token + 1)));
      };
      const std::span<const std::int32_t> prompt = std::span(ids).first(kPrompt);
      EXPECT_LE(error_at(generator.prefill(1, prompt, 17), kPrompt - 1), bound);
      for (std::int64_t token = kPrompt; token < kTokens; ++token) {
        const ConstTensorView logits = feed_one(generator, 1, ids[static_cast<std::size_t>(token)]);
        ASSERT_LE(error_at(logits, token), bound) << "token " << token;
      }
    }
  }
}

// More requests than slots: the batch changes as answers end, so steps are queued, recorded and
// replayed, one ahead of what the host has seen. Each answer is what its prompt gives alone, token
// by token.
TEST_F(DecodeGenerator, RecordedStepsGiveTheAnswersOfSingleSteps) {
  constexpr std::int64_t kMost = 30;
  for (const ModelConfig& config : all_models()) {
    SCOPED_TRACE(describe_all(config));
    Device device(DType::bf16, *backend_);
    TinyModel model(device.context(), config, *group_);
    Context context = device.context();
    std::vector<GenerateRequest> requests;
    for (const std::int64_t length : {5, 1, 33, 12, 20}) {
      requests.push_back({.prompt = random_ids(length, 50 + requests.size())});
    }
    std::vector<std::vector<std::int32_t>> want;
    Generator one(context, model.decoder(), 1);
    for (const GenerateRequest& request : requests) {
      one.reset(0);
      ConstTensorView logits = one.prefill(0, request.prompt, 64);
      want.emplace_back();
      while (static_cast<std::int64_t>(want.back().size()) < kMost) {
        const std::vector<double> values = values_of(context, logits);
        const auto best = std::max_element(values.begin(), values.end()) - values.begin();
        want.back().push_back(static_cast<std::int32_t>(best));
        logits = feed_one(one, 0, want.back().back());
      }
    }
    // A token of the first answer ends it early, others wherever they have it.
    const std::int32_t stop = want[0][9];
    for (std::vector<std::int32_t>& ids : want) {
      const auto end = std::ranges::find(ids, stop);
      ids.erase(end == ids.end() ? end : end + 1, ids.end());
    }
    Generator generator(context, model.decoder(), 2);
    const std::vector<GeneratedAnswer> answers =
        generate(context,
                 generator,
                 requests,
                 {.max_new_tokens = kMost, .stop_ids = {stop}, .prefill_chunk = 64});
    for (std::size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(answers[i].ids, want[i]) << "request " << i;
    }
  }
}

}  // namespace
}  // namespace bifocal::test
