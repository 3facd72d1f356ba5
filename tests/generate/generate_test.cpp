// Answers: those of the forward pass, whatever shares the batch, in memory that does not grow.
#include <algorithm>

#include <gtest/gtest.h>

#include "core/process.h"
#include "generate/generator.h"
#include "support/compare.h"
#include "support/speaker.h"

namespace bifocal::test {

namespace {

std::vector<GeneratedAnswer> speak(Speaker& speaker,
                                   std::int64_t batch,
                                   const std::vector<std::vector<std::int32_t>>& prompts,
                                   std::uint64_t first_stream,
                                   const GenerateOptions& options) {
  Generator generator = speaker.generator(batch);
  std::vector<GenerateRequest> requests;
  for (const std::vector<std::int32_t>& prompt : prompts) {
    requests.push_back({prompt, first_stream + requests.size()});
  }
  return generate(speaker.context(), generator, requests, options);
}

std::size_t argmax_of_row(const ConstTensorView& logits, std::int64_t row) {
  const std::vector<double> values = to_doubles(logits.rows(row, row + 1));
  return static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

// Draws 20,000 tokens, past a maximum position of 1,024: the process must not grow after the first
// thousand.
void expect_constant_memory(const char* preset,
                            std::int64_t batch,
                            const std::vector<std::int64_t>& prompts) {
  constexpr std::size_t kMebibyte = std::size_t{1} << 20;
  const ModelConfig teacher = tiny_teacher();
  Speaker speaker(
      tiny_student(teacher, make_mixers(preset, least_budget(preset, teacher) + 20, {}, teacher)),
      DType::f32);
  Generator generator = speaker.generator(batch);
  std::vector<GenerateRequest> requests;
  for (const std::int64_t length : prompts) {
    requests.push_back({random_ids(length, requests.size()), requests.size()});
  }
  std::size_t tokens = 0;
  std::size_t early = 0;
  generate(
      speaker.context(),
      generator,
      requests,
      {.max_new_tokens = 20000 / static_cast<std::int64_t>(prompts.size()), .temperature = 1.0},
      {.on_token = [&](std::int64_t, std::int32_t) {
        if (++tokens == 1000) {
          early = resident_bytes();
        }
      }});
  EXPECT_EQ(tokens, 20000U);
  EXPECT_GT(early, 0U);
  EXPECT_LT(resident_bytes(), early + kMebibyte) << preset;
}

TEST(Generate, ProcessMemoryOfAStudentStaysAsItIs) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer holds on to freed memory and keeps notes of its own";
#endif
  expect_constant_memory("bifocal", 1, {300});  // one sequence of 20,000
  for (const char* preset : {"bifocal", "swa_sink_tokens"}) {
    // A batch of three, so that sequences end and slots are used again on the way.
    expect_constant_memory(preset, 3, {5, 300, 40, 7, 120, 33, 1, 64});
  }
}

TEST(Generate, GreedyTakesTheLargestLogitOfTheForwardPass) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    const std::vector<std::int32_t> prompt = random_ids(35, 6);
    const std::vector<GeneratedAnswer> answers =
        speak(speaker, 1, {prompt}, 0, {.max_new_tokens = 20});
    ASSERT_EQ(answers[0].ids.size(), 20U);
    EXPECT_FALSE(answers[0].stopped);
    std::vector<std::int32_t> all = prompt;
    all.insert(all.end(), answers[0].ids.begin(), answers[0].ids.end());
    const Tensor logits = speaker.forward(all);
    for (std::int64_t i = 0; i < 20; ++i) {
      EXPECT_EQ(static_cast<std::size_t>(answers[0].ids[static_cast<std::size_t>(i)]),
                argmax_of_row(logits, 34 + i));
    }
  }
}

// More requests than slots, of uneven lengths, so that every slot is used again while others run.
TEST(Generate, AnswersDoNotDependOnTheBatch) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config, DType::f32);
    std::vector<std::vector<std::int32_t>> prompts;
    for (const std::int64_t length : {30, 1, 12, 50, 3, 17, 2, 25}) {
      prompts.push_back(random_ids(length, 7 + prompts.size()));
    }
    for (const double temperature : {0.0, 1.0}) {
      const GenerateOptions options{.max_new_tokens = 25,
                                    .temperature = temperature,
                                    .top_k = 40,
                                    .top_p = 0.95,
                                    .seed = 3,
                                    .stop_ids = {2, 11, 30}};
      std::vector<std::vector<std::int32_t>> alone;
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        alone.push_back(speak(speaker, 1, {prompts[i]}, 100 + i, options)[0].ids);
      }
      for (const std::int64_t batch : {1, 2, 3, 8, 20}) {
        const auto together = speak(speaker, batch, prompts, 100, options);
        for (std::size_t i = 0; i < prompts.size(); ++i) {
          EXPECT_EQ(together[i].ids, alone[i]);
        }
      }
    }
  }
}

TEST(Generate, EventsTellEveryTokenAndEveryAnswer) {
  Speaker speaker(tiny_teacher());
  Generator generator = speaker.generator(2);
  std::vector<GenerateRequest> requests;
  for (std::uint64_t i = 0; i < 5; ++i) {
    requests.push_back({random_ids(4, i), i});
  }
  std::vector<std::vector<std::int32_t>> told(5);
  std::vector<std::int64_t> finished;
  const auto answers = generate(
      speaker.context(),
      generator,
      requests,
      {.max_new_tokens = 30, .temperature = 1.0, .stop_ids = {3, 4, 5, 6, 7, 8}},
      {.on_token = [&](std::int64_t request,
                       std::int32_t id) { told[static_cast<std::size_t>(request)].push_back(id); },
       .on_finish =
           [&](std::int64_t request, const GeneratedAnswer& answer) {
             finished.push_back(request);
             EXPECT_EQ(answer.ids, told[static_cast<std::size_t>(request)]);
           }});
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(told[i], answers[i].ids);
    EXPECT_EQ(answers[i].stopped, answers[i].ids.back() >= 3 && answers[i].ids.back() <= 8);
  }
  std::ranges::sort(finished);
  EXPECT_EQ(finished, (std::vector<std::int64_t>{0, 1, 2, 3, 4}));
}

TEST(Generate, SamplesFollowSeedAndStream) {
  Speaker speaker(tiny_teacher());
  const std::vector<std::vector<std::int32_t>> prompts = {{5, 6}, {5, 6}};
  const GenerateOptions options{.max_new_tokens = 30, .temperature = 1.0, .seed = 3};
  const auto first = speak(speaker, 2, prompts, 0, options);
  EXPECT_NE(first[0].ids, first[1].ids);
  EXPECT_EQ(speak(speaker, 2, prompts, 0, options)[1].ids, first[1].ids);
  GenerateOptions other = options;
  other.seed = 4;
  EXPECT_NE(speak(speaker, 2, prompts, 0, other)[0].ids, first[0].ids);
}

TEST(Generate, StopsAtAStopTokenWhichItKeeps) {
  Speaker speaker(tiny_teacher());
  const std::vector<std::int32_t> prompt = random_ids(4, 12);
  const auto free = speak(speaker, 1, {prompt}, 0, {.max_new_tokens = 12, .temperature = 1.0});
  const std::int32_t stop = free[0].ids[5];
  const auto first = std::find(free[0].ids.begin(), free[0].ids.end(), stop);
  const auto stopped = speak(
      speaker, 1, {prompt}, 0, {.max_new_tokens = 12, .temperature = 1.0, .stop_ids = {stop}});
  EXPECT_TRUE(stopped[0].stopped);
  EXPECT_EQ(stopped[0].ids, std::vector<std::int32_t>(free[0].ids.begin(), first + 1));
}

// A second turn goes on where the first ended: as if all had been one prompt.
TEST(Generate, AConversationContinuesWithoutReadingItselfAgain) {
  for (const ModelConfig& config : all_models()) {
    Speaker speaker(config);
    const GenerateOptions options{.max_new_tokens = 15};
    Generator generator = speaker.generator(1);
    std::vector<std::int32_t> all = random_ids(30, 4);
    const auto first = continue_sequence(speaker.context(), generator, {all}, options);
    const std::vector<std::int32_t> turn = {first.ids.back(), 4, 5, 6};
    std::vector<std::int32_t> told;
    const auto second =
        continue_sequence(speaker.context(), generator, {turn}, options, [&](std::int32_t id) {
          told.push_back(id);
        });
    EXPECT_EQ(told, second.ids);
    all.insert(all.end(), first.ids.begin(), first.ids.end() - 1);
    all.insert(all.end(), turn.begin(), turn.end());
    EXPECT_EQ(generator.tokens(0), static_cast<std::int64_t>(all.size()) + 14);
    EXPECT_EQ(second.ids, speak(speaker, 1, {all}, 0, options)[0].ids);
  }
}

TEST(Generate, TakesNoNewTokensAndNoPrompts) {
  Speaker speaker(tiny_teacher());
  EXPECT_TRUE(speak(speaker, 2, {{1, 2, 3}}, 0, {.max_new_tokens = 0})[0].ids.empty());
  EXPECT_TRUE(speak(speaker, 2, {}, 0, {.max_new_tokens = 4}).empty());
}

TEST(Generate, RefusesEmptyPromptsAndForeignIds) {
  Speaker speaker(tiny_teacher());
  EXPECT_THROW(speak(speaker, 1, {{1}, {}}, 0, {}), Error);
  EXPECT_THROW(speak(speaker, 1, {{1, 53}}, 0, {}), Error);
  EXPECT_THROW(speak(speaker, 1, {{-1}}, 0, {}), Error);
}

}  // namespace

}  // namespace bifocal::test
