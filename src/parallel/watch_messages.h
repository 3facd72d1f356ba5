// What the threads that watch over ranks say to each other.
//
// Messages are objects with "kind":
//   hello    {token, rank, host, process, start}    a rank to rank 0, first of all
//   welcome  {}                                      the answer
//   beat     {stage, step, phase, marks}             both ways
//   error    {text, stage, step, phase, marks}       a rank to rank 0: it ends by this error
//   end      {rank, text}                            rank 0 to all: the job ends because of `rank`
//   bye      {}                                      both ways: nothing follows, all is well
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "core/progress.h"
#include "parallel/rank_states.h"

namespace bifocal {

nlohmann::json hello_message(const RankIdentity& identity, const std::string& token);
// beat or error, whose text is added to it.
nlohmann::json progress_message(const char* kind, const ProgressState& state);

// Empty where a message has none. Fields that are absent or of another type have their defaults.
std::string kind_of(const nlohmann::json& message);
std::string text_of(const nlohmann::json& message, const char* field);
RankIdentity identity_of(const nlohmann::json& message);
ProgressState state_of(const nlohmann::json& message);

}  // namespace bifocal
