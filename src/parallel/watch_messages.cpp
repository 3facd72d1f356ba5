// Fields are read without trust: a stranger may connect too.
#include "parallel/watch_messages.h"

#include <limits>

namespace bifocal {

namespace {

using nlohmann::json;

// 0 for what is no integer.
std::int64_t number_of(const json& message, const char* field) {
  const auto found = message.find(field);
  return found != message.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
}

}  // namespace

json hello_message(const RankIdentity& identity, const std::string& token) {
  return {{"kind", "hello"},
          {"token", token},
          {"rank", identity.rank},
          {"host", identity.host},
          {"process", identity.process.number},
          {"start", identity.process.start}};
}

json progress_message(const char* kind, const ProgressState& state) {
  return {{"kind", kind},
          {"stage", state.stage},
          {"step", state.step},
          {"phase", state.phase},
          {"marks", state.marks}};
}

std::string kind_of(const json& message) {
  return text_of(message, "kind");
}

std::string text_of(const json& message, const char* field) {
  const auto found = message.find(field);
  return found != message.end() && found->is_string() ? found->get<std::string>() : "";
}

RankIdentity identity_of(const json& message) {
  const std::int64_t rank = number_of(message, "rank");
  const bool is_rank = rank >= 0 && rank <= std::numeric_limits<int>::max();
  return {.rank = is_rank ? static_cast<int>(rank) : -1,
          .host = text_of(message, "host"),
          .process = {.number = number_of(message, "process"),
                      .start = static_cast<std::uint64_t>(number_of(message, "start"))}};
}

ProgressState state_of(const json& message) {
  return {.stage = text_of(message, "stage"),
          .step = number_of(message, "step"),
          .phase = text_of(message, "phase"),
          .marks = static_cast<std::uint64_t>(number_of(message, "marks"))};
}

}  // namespace bifocal
