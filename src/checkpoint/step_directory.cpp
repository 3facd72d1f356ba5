// Publishing and removing of step directories.
#include "checkpoint/step_directory.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <optional>
#include <string>
#include <system_error>

#include "checkpoint/manifest.h"
#include "core/file.h"

namespace bifocal {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kPrefix = "step_";
constexpr std::string_view kUnfinished = ".tmp";

// N of "step_N".
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) {
    return std::nullopt;
  }
  name.remove_prefix(kPrefix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool whole = error == std::errc() && end == name.data() + name.size();
  return whole && std::to_string(step) == name ? std::optional(step) : std::nullopt;
}

bool is_complete(const fs::path& checkpoint) {
  try {
    read_manifest(checkpoint);
    return true;
  } catch (const NewerFormatError&) {
    throw;
  } catch (const Error&) {
    return false;
  }
}

// The whole entry or none of it: a removal that is cut short leaves an unfinished directory.
void remove_step(const fs::path& directory, std::int64_t step) {
  const fs::path unfinished = unfinished_path(directory, step);
  fs::remove_all(unfinished);
  fs::rename(step_path(directory, step), unfinished);
  fsync_directory(directory);
  fs::remove_all(unfinished);
}

// Swaps two directories in one step.
void exchange(const fs::path& a, const fs::path& b) {
  BIFOCAL_REQUIRE(::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0,
                  "[checkpoint] {} is there already and this file system cannot replace it in one "
                  "step ({}): move it away, then save again",
                  b.string(),
                  std::strerror(errno));
}

}  // namespace

fs::path step_path(const fs::path& directory, std::int64_t step) {
  return directory / (std::string(kPrefix) + std::to_string(step));
}

fs::path unfinished_path(const fs::path& directory, std::int64_t step) {
  return step_path(directory, step) += kUnfinished;
}

std::vector<std::int64_t> complete_steps(const fs::path& directory) {
  std::vector<std::int64_t> steps;
  if (!fs::is_directory(directory)) {
    return steps;
  }
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const auto step = step_of(entry.path().filename().native());
    if (step.has_value() && is_complete(entry.path())) {
      steps.push_back(*step);
    }
  }
  std::sort(steps.begin(), steps.end(), std::greater<>());
  return steps;
}

void remove_unfinished(const fs::path& directory) {
  std::vector<fs::path> unfinished;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().native();
    if (name.ends_with(kUnfinished) &&
        step_of(std::string_view(name).substr(0, name.size() - kUnfinished.size())).has_value()) {
      unfinished.push_back(entry.path());
    }
  }
  for (const fs::path& path : unfinished) {
    fs::remove_all(path);
  }
}

void publish_step(const fs::path& directory, std::int64_t step) {
  const fs::path unfinished = unfinished_path(directory, step);
  const fs::path path = step_path(directory, step);
  fsync_directory(unfinished);
  if (fs::exists(path) && is_complete(path)) {
    exchange(unfinished, path);
  } else {
    fs::remove_all(path);
    fs::rename(unfinished, path);
  }
  fsync_directory(directory);
  write_file_atomically(directory / "latest", path.filename().string() + "\n");
  fs::remove_all(unfinished);
}

void remove_old_steps(const fs::path& directory, const KeepRule& keep, std::int64_t written) {
  if (keep.newest == 0) {
    return;
  }
  std::int64_t kept = 0;
  for (const std::int64_t step : complete_steps(directory)) {
    if (kept < keep.newest) {
      ++kept;
    } else if (step != written && (keep.multiples_of == 0 || step % keep.multiples_of != 0)) {
      remove_step(directory, step);
    }
  }
}

}  // namespace bifocal
