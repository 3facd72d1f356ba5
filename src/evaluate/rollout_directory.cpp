// The directory of a run of rollouts: opening, appending, merging.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sys/file.h>
#include <unistd.h>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/file.h"
#include "evaluate/rollout_file.h"

namespace bifocal {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr const char* kFormat = "bifocal rollouts";
constexpr const char* kMerged = "rollouts.jsonl";

// Runs on rank 0 alone; its Error reaches every rank.
template <class Work>
void on_rank_zero(Communicator& world, const Work& work) {
  std::string error;
  if (world.rank() == 0) {
    try {
      work();
    } catch (const std::exception& reason) {
      error = reason.what();
    }
  }
  require_all(world, error);
}

bool is_part(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with("part-") && name.ends_with(".jsonl");
}

// Cuts off what a killed process left behind the last line break.
void cut_torn_line(const fs::path& path) {
  const std::string text = read_file(path);
  const std::size_t whole = text.rfind('\n') + 1;  // npos + 1 is 0
  if (whole < text.size()) {
    fs::resize_file(path, whole);
  }
}

}  // namespace

RolloutDirectory::RolloutDirectory(Communicator& world,
                                   const fs::path& path,
                                   const ProblemSet& problems,
                                   std::int64_t samples,
                                   const Json& settings,
                                   const Json& origin)
    : world_(&world), path_(path), problems_(&problems), samples_(samples) {
  BIFOCAL_REQUIRE(samples >= 1, "[rollouts] wanted at least 1 sample, got {}", samples);
  done_.assign(problems.problems().size() * static_cast<std::size_t>(samples), 0);
  on_rank_zero(world, [&] { open_on_rank_zero(settings, origin); });
  world.broadcast({done_.data(), DType::u8, {static_cast<std::int64_t>(done_.size())}}, 0);
}

RolloutDirectory::OpenFile::~OpenFile() {
  if (number >= 0) {
    ::close(number);  // gives a lock back
  }
}

void RolloutDirectory::OpenFile::close() {
  const int open = std::exchange(number, -1);
  if (open < 0) {
    return;
  }
  const bool is_stored = ::fsync(open) == 0;
  const bool is_closed = ::close(open) == 0;
  BIFOCAL_REQUIRE(
      is_stored && is_closed, "[rollouts] writing a part failed: {}", std::strerror(errno));
}

void RolloutDirectory::open_on_rank_zero(const Json& settings, const Json& origin) {
  fs::create_directories(path_);
  lock_.number = ::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  BIFOCAL_REQUIRE(
      lock_.number >= 0, "[rollouts] cannot open {}: {}", path_.string(), std::strerror(errno));
  BIFOCAL_REQUIRE(::flock(lock_.number, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
                  "[rollouts] another run is writing into {}: wait for it or end it",
                  path_.string());
  if (fs::exists(path_ / "run.json")) {
    check_run_file(settings, origin);
  } else {
    const bool is_new =
        std::all_of(fs::directory_iterator(path_),
                    fs::directory_iterator(),
                    [](const fs::directory_entry& entry) {
                      // Of a run that was killed here.
                      return entry.path().filename().string().starts_with("run.json.tmp.");
                    });
    BIFOCAL_REQUIRE(is_new,
                    "[rollouts] {} holds files and is no run of rollouts: give an empty directory",
                    path_.string());
    const Json run{{"format", kFormat},
                   {"version", kVersion},
                   {"settings", settings},
                   {"origins", Json::array({origin})}};
    write_file_atomically(path_ / "run.json", run.dump(1) + "\n");
  }
  read_parts();
}

// The settings must be those of the run; an origin that is new is noted.
void RolloutDirectory::check_run_file(const Json& settings, const Json& origin) {
  const fs::path file = path_ / "run.json";
  Json run = Json::parse(read_file(file), nullptr, false);
  BIFOCAL_REQUIRE(run.is_object() && run.value("format", "") == kFormat,
                  "[rollouts] {} is no file of a run of rollouts: give another directory",
                  file.string());
  BIFOCAL_REQUIRE(run.value("version", 0) == kVersion,
                  "[rollouts] {} has version {}, this program reads version {}",
                  file.string(),
                  run.value("version", 0),
                  kVersion);
  Json& old = run["settings"];
  for (const auto* side : {static_cast<const Json*>(&old), &settings}) {
    for (const auto& item : side->items()) {
      const Json was = old.value(item.key(), Json());
      const Json is = settings.value(item.key(), Json());
      BIFOCAL_REQUIRE(was == is,
                      "[rollouts] {} was made with {} {}, now it is {}: give another directory or "
                      "the same settings",
                      path_.string(),
                      item.key(),
                      was.dump(),
                      is.dump());
    }
  }
  Json& origins = run["origins"];
  if (std::ranges::find(origins, origin) == origins.end()) {
    origins.push_back(origin);
    write_file_atomically(file, run.dump(1) + "\n");
  }
  has_other_commits_ = std::any_of(origins.begin(), origins.end(), [&](const Json& other) {
    return other.value("commit", "") != origin.at("commit").get<std::string>();
  });
}

std::vector<fs::path> RolloutDirectory::line_files() const {
  std::vector<fs::path> files;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_)) {
    if (is_part(entry.path()) || entry.path().filename() == kMerged) {
      files.push_back(entry.path());
    }
  }
  std::ranges::sort(files);
  return files;
}

std::size_t RolloutDirectory::place_of(const Rollout& rollout) const {
  const auto problem = problems_->find(rollout.id);
  BIFOCAL_REQUIRE(problem && rollout.sample < samples_,
                  "[rollouts] {} holds sample {} of problem {}, which was not asked for",
                  path_.string(),
                  rollout.sample,
                  rollout.id);
  return *problem * static_cast<std::size_t>(samples_) + static_cast<std::size_t>(rollout.sample);
}

std::vector<RolloutDirectory::Line> RolloutDirectory::find_lines() const {
  const std::vector<fs::path> files = line_files();
  std::vector<Line> lines(done_.size());
  for (std::size_t f = 0; f < files.size(); ++f) {
    std::ifstream file(files[f], std::ios::binary);
    std::int64_t begin = 0;
    std::int64_t number = 1;
    for (std::string text; std::getline(file, text); ++number) {
      try {
        Line& line = lines[place_of(parse_rollout(nlohmann::json::parse(text)))];
        // A run killed while it merged leaves samples twice, with the same bytes.
        line = {static_cast<std::int64_t>(f), begin, static_cast<std::int64_t>(text.size())};
      } catch (const std::exception& error) {
        fail("[rollouts] {}:{}: {}: remove the line, its sample is drawn again",
             files[f].string(),
             number,
             error.what());
      }
      begin += static_cast<std::int64_t>(text.size()) + 1;
    }
    BIFOCAL_REQUIRE(!file.bad(), "[rollouts] reading {} failed", files[f].string());
  }
  return lines;
}

void RolloutDirectory::read_parts() {
  for (const fs::path& file : line_files()) {
    cut_torn_line(file);
  }
  std::ranges::transform(find_lines(), done_.begin(), [](const Line& line) {
    return static_cast<std::uint8_t>(line.file >= 0 ? 1 : 0);
  });
}

void RolloutDirectory::append(const Rollout& rollout) {
  place_of(rollout);
  const fs::path file = path_ / fmt::format("part-{:04}.jsonl", world_->rank());
  if (part_.number < 0) {
    part_.number = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    BIFOCAL_REQUIRE(
        part_.number >= 0, "[rollouts] cannot write {}: {}", file.string(), std::strerror(errno));
  }
  const std::string line = rollout_line(rollout) + "\n";
  for (std::size_t written = 0; written < line.size();) {
    const ssize_t count = ::write(part_.number, line.data() + written, line.size() - written);
    BIFOCAL_REQUIRE(count >= 0 || errno == EINTR,
                    "[rollouts] writing {} failed: {}",
                    file.string(),
                    std::strerror(errno));
    written += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
}

void RolloutDirectory::write_merged() {
  const std::vector<fs::path> files = line_files();
  if (files.size() == 1 && files[0].filename() == kMerged) {
    return;
  }
  const std::vector<Line> lines = find_lines();
  const fs::path temporary = path_ / fmt::format("{}.tmp", kMerged);
  std::vector<std::ifstream> sources;
  sources.reserve(files.size());
  for (const fs::path& file : files) {
    sources.emplace_back(file, std::ios::binary);
  }
  std::ofstream merged(temporary, std::ios::binary | std::ios::trunc);
  std::string text;
  for (std::size_t place = 0; place < lines.size(); ++place) {
    const Line& line = lines[place];
    const auto samples = static_cast<std::size_t>(samples_);
    BIFOCAL_REQUIRE(line.file >= 0,
                    "[rollouts] {} lacks sample {} of problem {}: give the same command again",
                    path_.string(),
                    place % samples,
                    problems_->problems()[place / samples].id);
    text.resize(static_cast<std::size_t>(line.bytes));
    std::ifstream& source = sources[static_cast<std::size_t>(line.file)];
    source.seekg(line.begin);
    source.read(text.data(), line.bytes);
    BIFOCAL_REQUIRE(source.good(), "[rollouts] reading the parts in {} failed", path_.string());
    merged << text << '\n';
  }
  merged.close();
  BIFOCAL_REQUIRE(
      merged.good(), "[rollouts] writing {} failed: is the disk full?", temporary.string());
  fsync_file(temporary);
  fs::rename(temporary, path_ / kMerged);
  fsync_directory(path_);
  for (const fs::path& file : files) {
    if (is_part(file)) {
      fs::remove(file);
    }
  }
}

void RolloutDirectory::merge() {
  std::string error;
  try {
    part_.close();  // on a network file system others see what was written from then on
  } catch (const Error& reason) {
    error = reason.what();
  }
  require_all(*world_, error);
  world_->barrier();
  on_rank_zero(*world_, [&] { write_merged(); });
}

}  // namespace bifocal
