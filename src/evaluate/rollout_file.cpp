// Lines of rollouts, and reading them.
#include "evaluate/rollout_file.h"

#include <set>
#include <utility>

#include "core/error.h"
#include "core/file.h"
#include "data/json_lines.h"

namespace bifocal {

namespace fs = std::filesystem;

std::string rollout_line(const Rollout& rollout) {
  nlohmann::ordered_json line{{"id", rollout.id}, {"sample", rollout.sample}};
  if (rollout.text) {
    line["answer"] = *rollout.text;
  }
  line["answer_ids"] = rollout.ids;
  line["tokens"] = rollout.tokens;
  line["finish_reason"] = rollout.stopped ? "stop" : "length";
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Rollout parse_rollout(const nlohmann::json& line) {
  BIFOCAL_REQUIRE(line.is_object() && line.contains("id"),
                  "[rollouts] wanted an object with id, got none");
  Rollout rollout{.id = id_text(line["id"]), .sample = line.value("sample", std::int64_t{0})};
  BIFOCAL_REQUIRE(
      rollout.sample >= 0, "[rollouts] wanted a sample number from 0 on, got {}", rollout.sample);
  if (line.contains("answer")) {
    rollout.text = line["answer"].get<std::string>();
  }
  if (line.contains("answer_ids")) {
    rollout.ids = int32_array(line["answer_ids"]);
  }
  BIFOCAL_REQUIRE(line.contains("tokens") || line.contains("answer_ids"),
                  "[rollouts] sample {} of {}: wanted tokens or answer_ids, got neither",
                  rollout.sample,
                  rollout.id);
  rollout.tokens = line.value("tokens", static_cast<std::int64_t>(rollout.ids.size()));
  BIFOCAL_REQUIRE(
      rollout.tokens >= 0, "[rollouts] wanted at least 0 tokens, got {}", rollout.tokens);
  const auto reason = line.at("finish_reason").get<std::string>();
  BIFOCAL_REQUIRE(reason == "stop" || reason == "length",
                  "[rollouts] wanted stop or length as finish_reason, got {}",
                  reason);
  rollout.stopped = reason == "stop";
  return rollout;
}

std::vector<Rollout> read_rollouts(const fs::path& path) {
  fs::path file = path;
  if (fs::is_directory(path)) {
    file = path / "rollouts.jsonl";
    BIFOCAL_REQUIRE(fs::exists(file),
                    "[rollouts] {} is not finished: give the same command again to complete it",
                    path.string());
  }
  std::vector<Rollout> rollouts;
  std::set<std::pair<std::string, std::int64_t>> seen;
  for_each_json_line(file.string(), [&](const nlohmann::json& line) {
    rollouts.push_back(parse_rollout(line));
    BIFOCAL_REQUIRE(seen.emplace(rollouts.back().id, rollouts.back().sample).second,
                    "[rollouts] a second time sample {} of problem {}",
                    rollouts.back().sample,
                    rollouts.back().id);
  });
  BIFOCAL_REQUIRE(!rollouts.empty(), "[rollouts] {} holds no sample", file.string());
  return rollouts;
}

nlohmann::json rollout_settings(const fs::path& path) {
  const fs::path file = (fs::is_directory(path) ? path : path.parent_path()) / "run.json";
  if (!fs::exists(file)) {
    return nullptr;
  }
  const nlohmann::json run = nlohmann::json::parse(read_file(file), nullptr, false);
  return run.is_object() ? run.value("settings", nlohmann::json()) : nlohmann::json();
}

}  // namespace bifocal
