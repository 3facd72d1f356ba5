// Each form of a line: ids, mask, refusals.
#include "data/document.h"

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "support/byte_tokenizer.h"
#include "support/error_of.h"

namespace bifocal {
namespace {

using Ids = std::vector<std::int32_t>;
using Keep = std::vector<std::uint8_t>;
using test::ByteTokenizer;

const ByteTokenizer& tokenizer() {
  static const ByteTokenizer instance;
  return instance;
}

DocumentOptions options() {
  return {.tokenizer = &tokenizer(), .chat = ChatTemplate::named("chatml"), .vocabulary = 260};
}

Document read(const std::string& line, const DocumentOptions& with = options()) {
  return DocumentReader(with).read(line);
}

std::string fault(const std::string& line, const DocumentOptions& with = options()) {
  return test::error_of([&] { read(line, with); });
}

// The tokens that a document's mask predicts, as text.
std::string kept_text(const Document& document) {
  Ids kept;
  for (std::size_t t = 0; t + 1 < document.ids.size(); ++t) {
    if (document.keep[t] == 1) {
      kept.push_back(document.ids[t + 1]);
    }
  }
  return tokenizer().decode(kept, false);
}

TEST(Document, TextGetsThePrefixAndTheEndToken) {
  Document document = read(R"({"text": "ab", "id": 7})");
  EXPECT_EQ(document.ids, (Ids{ByteTokenizer::kBegin, 'a', 'b'}));
  EXPECT_EQ(document.keep, (Keep{1, 1, 0}));
  DocumentOptions with_end = options();
  with_end.end_token = "<|endoftext|>";
  document = read(R"({"text": "ab"})", with_end);
  EXPECT_EQ(document.ids, (Ids{ByteTokenizer::kBegin, 'a', 'b', ByteTokenizer::kEndOfText}));
  EXPECT_EQ(document.keep, (Keep{1, 1, 1, 0}));
}

TEST(Document, CompletionsAreKeptWithTheirEndToken) {
  Document document = read(R"({"prompt": "abc", "completion": "de"})");
  EXPECT_EQ(document.ids, (Ids{ByteTokenizer::kBegin, 'a', 'b', 'c', 'd', 'e'}));
  EXPECT_EQ(document.keep, (Keep{0, 0, 0, 1, 1, 0}));
  DocumentOptions with_end = options();
  with_end.end_token = "<|endoftext|>";
  EXPECT_EQ(kept_text(read(R"({"prompt": "abc", "completion": "de"})", with_end)),
            "de<|endoftext|>");
  EXPECT_EQ(kept_text(read(R"({"prompt": "", "completion": "de"})", with_end)), "de<|endoftext|>");
  EXPECT_EQ(kept_text(read(R"({"prompt": "abc", "completion": ""})")), "");
  const ByteTokenizer no_prefix(false);
  DocumentOptions bare = options();
  bare.tokenizer = &no_prefix;
  EXPECT_EQ(kept_text(read(R"({"prompt": "", "completion": "de"})", bare)), "e");
}

TEST(Document, MessagesKeepWhatTheAssistantSays) {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "one"},)"
      R"( {"role": "user", "content": "v"}, {"role": "assistant", "content": "two"}]})";
  const Document document = read(line);
  EXPECT_EQ(tokenizer().decode(document.ids, false),
            "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n");
  EXPECT_EQ(kept_text(document), "one<|im_end|>two<|im_end|>");
}

TEST(Document, ConversationsKeepTheCompletionAlone) {
  const Document document = read(
      R"({"prompt": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "one"},)"
      R"( {"role": "user", "content": "v"}], "completion": [{"role": "assistant", "content": "two"}]})");
  EXPECT_EQ(tokenizer().decode(document.ids, false),
            "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
            "<|im_start|>user\nv<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n");
  EXPECT_EQ(kept_text(document), "two<|im_end|>");
  EXPECT_NE(fault(R"({"prompt": [{"role": "user", "content": "u"}],)"
                  R"( "completion": [{"role": "user", "content": "v"}]})")
                .find("begin with the assistant"),
            std::string::npos);
}

TEST(Document, IdsNeedNoTokenizer) {
  const DocumentOptions bare{.vocabulary = 10};
  EXPECT_EQ(read(R"({"ids": [5, 6, 7]})", bare).keep, (Keep{1, 1, 0}));
  EXPECT_EQ(read(R"({"ids": [5, 6], "keep": [0, 1]})", bare).keep, (Keep{0, 1}));
  const Document document =
      read(R"({"prompt_ids": [1, 2], "answer_ids": [3, 4], "prompt": "x"})", bare);
  EXPECT_EQ(document.ids, (Ids{1, 2, 3, 4}));
  EXPECT_EQ(document.keep, (Keep{0, 1, 1, 0}));
}

TEST(Document, EmptyDocumentsHaveNoIds) {
  DocumentOptions with_end = options();
  with_end.end_token = "<|endoftext|>";
  for (const char* line : {R"({"text": ""})",
                           R"({"prompt": "", "completion": ""})",
                           R"({"messages": []})",
                           R"({"ids": []})",
                           R"({"ids": [], "keep": []})",
                           R"({"prompt_ids": [], "answer_ids": []})"}) {
    EXPECT_TRUE(read(line, with_end).ids.empty()) << line;
  }
}

TEST(Document, AFormIsChosenWhereALineHasSeveral) {
  const std::string line = R"({"text": "ab", "ids": [1, 2, 3], "messages": null})";
  EXPECT_NE(
      fault(line).find("a line holds text and ids: which is the document? Choose with --form text"),
      std::string::npos)
      << fault(line);
  DocumentOptions chosen = options();
  chosen.form = document_form("ids");
  EXPECT_EQ(read(line, chosen).ids, (Ids{1, 2, 3}));
  chosen.form = document_form("messages");
  EXPECT_NE(fault(line, chosen).find("messages needs messages"), std::string::npos)
      << fault(line, chosen);
  EXPECT_THROW(document_form("poem"), Error);
  for (const char* name : {"any", "messages", "completion", "text", "ids", "answer_ids"}) {
    EXPECT_EQ(name_of(document_form(name)), name);
  }
}

TEST(Document, RefusalsSayWhatWasWanted) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[1]", "should hold an object, got array"},
      {"{}", "a line needs one of messages, text, ids"},
      {R"({"text": null})", "a line needs one of"},
      {R"({"prompt": "a"})", "a line needs one of"},
      {R"({"completion": "a"})", "completion needs prompt"},
      {R"({"answer_ids": [1]})", "answer_ids needs prompt_ids"},
      {R"({"text": 3})", "text should be a string, got number"},
      {R"({"prompt": ["a"], "completion": "b"})", "prompt should be a string, got array"},
      {R"({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]})",
       "completion should be a string, got array"},
      {R"({"text": "a", "keep": [1]})", "keep goes with ids"},
      {R"({"ids": [1, 260]})", "ids must be from 0 to 259, got 260"},
      {R"({"ids": [1, -3]})", "got -3"},
      {R"({"ids": [], "keep": [1]})", "one entry per token: 0 tokens, 1 entries"},
      {R"({"ids": [1], "keep": [2]})", "0 and 1 only"},
      {R"({"messages": "hello"})", "[messages] wanted an array"},
      {R"({"messages": [{"role": "wizard", "content": "x"}]})",
       "wanted the role system, user or assistant"},
      {R"({"messages": [{"role": "user"}]})", "wanted a text as content"},
      {"{\"text\": \"\xff\"}", "byte 11: wanted UTF-8, got 0xff"},
  };
  for (const auto& [line, wanted] : cases) {
    const std::string text = fault(line);
    EXPECT_FALSE(text.empty()) << line;
    EXPECT_NE(text.find(wanted), std::string::npos) << line << "\n" << text;
  }
}

TEST(Document, ACompletionMayBeginWithALineBreak) {
  // This tokenizer makes one token of the template's line break and the content's.
  const auto qwen = read_tokenizer(std::string(BIFOCAL_SOURCE_DIR) + "/tests/data/tokenizers/qwen");
  const DocumentOptions chat{.tokenizer = qwen.get(),
                             .chat = ChatTemplate::named("chatml"),
                             .vocabulary = qwen->vocabulary()};
  const std::string user = R"({"role": "user", "content": "one"})";
  const std::string assistant = R"({"role": "assistant", "content": "\n\ntwo"})";
  const Document apart =
      read(R"({"prompt": [)" + user + R"(], "completion": [)" + assistant + "]}", chat);
  const Document whole = read(R"({"messages": [)" + user + ", " + assistant + "]}", chat);
  EXPECT_EQ(apart.ids, whole.ids);
  EXPECT_EQ(apart.keep, whole.keep);
}

TEST(Document, WhatIsMissingIsNamed) {
  const DocumentOptions bare{.vocabulary = 260};
  EXPECT_NE(fault(R"({"text": "a"})", bare).find("text needs --tokenizer"), std::string::npos);
  EXPECT_NE(fault(R"({"messages": [{"role": "user", "content": "x"}]})", bare)
                .find("messages need --tokenizer"),
            std::string::npos);
  DocumentOptions no_chat = options();
  no_chat.chat.reset();
  no_chat.no_chat_reason = "none is known";
  EXPECT_NE(fault(R"({"messages": [{"role": "user", "content": "x"}]})", no_chat)
                .find("messages need --chat-template: none is known"),
            std::string::npos);
  EXPECT_EQ(fault(R"({"text": "a"})", no_chat), "");
  DocumentOptions wrong_end = options();
  wrong_end.end_token = "</s>";
  EXPECT_NE(fault("{}", wrong_end).find("the tokenizer has no token </s>"), std::string::npos);
  DocumentOptions no_tokenizer{.end_token = "</s>", .vocabulary = 5};
  EXPECT_NE(fault("{}", no_tokenizer).find("an end token needs --tokenizer"), std::string::npos);
}

}  // namespace
}  // namespace bifocal
