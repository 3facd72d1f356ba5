// Ticks of a fifth of a second: cheap, and quick enough for limits of seconds.
#include "parallel/watch_thread.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <poll.h>
#include <random>
#include <sys/eventfd.h>
#include <unistd.h>
#include <utility>

#include "core/error.h"
#include "parallel/watch_messages.h"

namespace bifocal {

namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kTick{200};
// Messages that come within this time are read together: rank 0 has many peers.
constexpr milliseconds kBatch{20};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Past stdio, whose locks the main thread may hold for ever (a terminal that is not read, Ctrl-S).
// Gives up where standard error is not read either.
void print_error(std::string_view text) {
  constexpr milliseconds kLimit{2000};
  constexpr std::size_t kPiece = 512;  // fits where a pipe can be written to at all
  while (!text.empty() && wait_writable(STDERR_FILENO, kLimit)) {
    const ssize_t written = write(STDERR_FILENO, text.data(), std::min(text.size(), kPiece));
    if (written <= 0) {
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

[[noreturn]] void end_process() {
  std::_Exit(EXIT_FAILURE);
}

// What strangers cannot guess.
std::string random_token() {
  std::random_device device;
  std::string token;
  for (int word = 0; word < 4; ++word) {
    token += fmt::format("{:08x}", device());
  }
  return token;
}

// Whether rank 0 answers.
bool is_welcome(MessageSocket& socket) {
  constexpr double kLimit = 3.0;
  const auto begin = std::chrono::steady_clock::now();
  while (socket.is_open() && seconds_since(begin) < kLimit) {
    wait_readable(socket.descriptor(), kTick);
    if (!socket.receive().empty()) {
      return true;
    }
  }
  return false;
}

// Rank 0 judges progress, the others rank 0's life alone.
WatchLimits judged_limits(const WatchLimits& limits, int rank) {
  return {.heartbeat = limits.heartbeat, .progress = rank == 0 ? limits.progress : 0.0};
}

}  // namespace

WatchThread::WatchThread(RankIdentity self,
                         int ranks,
                         const WatchLimits& limits,
                         Progress& progress)
    : self_(std::move(self)),
      ranks_(ranks),
      limits_(limits),
      progress_(&progress),
      states_(ranks, self_.host, judged_limits(limits, self_.rank)),
      peers_(static_cast<std::size_t>(ranks)),
      wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

WatchThread::~WatchThread() {
  if (thread_.joinable()) {
    ask(Request::farewell, "");
    thread_.join();
  }
}

json WatchThread::listen() {
  listener_.emplace();
  token_ = random_token();
  return {{"token", token_},
          {"rank", 0},
          {"host", self_.host},
          {"process", self_.process.number},
          {"start", self_.process.start},
          {"addresses", listener_->endpoint().addresses},
          {"port", listener_->endpoint().port}};
}

void WatchThread::join(const json& place) {
  constexpr milliseconds kLimit{3000};
  const auto port = place.at("port").get<std::uint16_t>();
  std::string tried;
  for (const std::string address : place.at("addresses")) {
    auto [socket, reason] = connect_to(address, port, kLimit);
    if (socket) {
      socket->send(hello_message(self_, text_of(place, "token")));
      if (is_welcome(*socket)) {
        states_.join(identity_of(place), watched_);
        peers_.front().emplace(std::move(*socket));
        return;
      }
      reason = "somebody else answers there";
    }
    tried += fmt::format("; {}: {}", address, reason);
  }
  fail(
      "[watch] rank {} of {} (host {}) cannot reach rank 0 (host {}, port {}){}: let the hosts "
      "connect to each other by TCP, or set run.heartbeat_seconds = 0, which leaves ranks that "
      "die to the launcher",
      self_.rank,
      ranks_,
      self_.host,
      text_of(place, "host"),
      port,
      tried);
}

// Signals are for the main thread.
void WatchThread::run() {
  if (self_.rank == 0) {
    states_.join(self_, watched_);
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { loop(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void WatchThread::announce_error(const std::string& text) {
  constexpr milliseconds kRankZeroFirst{500};
  if (self_.rank != 0) {
    ask(Request::error, text);
    std::this_thread::sleep_for(kRankZeroFirst);
  }
}

void WatchThread::end_job(const std::string& text) {
  constexpr milliseconds kRankZeroAnswers{8000};
  if (self_.rank != 0) {
    std::this_thread::sleep_for(kRankZeroAnswers);
    return;
  }
  ask(Request::end, text);
  std::unique_lock lock(mutex_);
  done_.wait_for(lock, kRankZeroAnswers, [this] { return is_done_; });
}

void WatchThread::ask(Request request, const std::string& text) {
  {
    const std::lock_guard lock(mutex_);
    request_ = request;
    request_text_ = text;
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.number(), &one, sizeof one);
}

void WatchThread::loop() {
  try {
    while (look()) {
    }
  } catch (const std::exception& error) {
    print_error(fmt::format("bifocal: rank {} of {} (host {}) ends: [watch] {}\n",
                            self_.rank,
                            ranks_,
                            self_.host,
                            error.what()));
    end_process();
  }
}

bool WatchThread::look() {
  wait();
  advance();
  accept();
  for (int rank = 0; rank < ranks_; ++rank) {
    hear(rank);
  }
  if (!serve_request()) {
    return false;
  }
  beat();
  if (const std::optional<RankFault> fault = states_.judge(watched_)) {
    end_with(*fault);
  }
  return true;
}

void WatchThread::wait() {
  std::vector<pollfd> entries;
  const auto add = [&entries](int descriptor) {
    entries.push_back({.fd = descriptor, .events = POLLIN, .revents = 0});
  };
  for (const std::optional<MessageSocket>& peer : peers_) {
    if (peer && peer->is_open()) {
      add(peer->descriptor());
    }
  }
  for (const MessageSocket& guest : guests_) {
    add(guest.descriptor());
  }
  if (listener_) {
    add(listener_->descriptor());
  }
  add(wake_.number());
  if (poll(entries.data(), entries.size(), static_cast<int>(kTick.count())) > 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(wake_.number(), &count, sizeof count);
    std::this_thread::sleep_for(kBatch);
  }
}

// Time in which this process did not run itself is no fault of the others.
void WatchThread::advance() {
  constexpr double kLongestLook = 1.0;
  const Clock::time_point now = Clock::now();
  watched_ += std::min(kLongestLook, std::chrono::duration<double>(now - looked_at_).count());
  looked_at_ = now;
}

void WatchThread::accept() {
  if (!listener_) {
    return;
  }
  while (std::optional<MessageSocket> guest = listener_->accept()) {
    guests_.push_back(std::move(*guest));
  }
  for (std::size_t guest = 0; guest < guests_.size(); ++guest) {
    welcome(guest);
  }
  std::erase_if(guests_, [](const MessageSocket& guest) { return !guest.is_open(); });
  if (joined_ == ranks_) {
    guests_.clear();
    listener_.reset();
  }
}

// Takes a guest that has said who it is; others have to go.
void WatchThread::welcome(std::size_t guest) {
  const std::vector<json> messages = guests_[guest].receive();
  if (messages.empty()) {
    return;
  }
  MessageSocket socket = std::exchange(guests_[guest], MessageSocket(Descriptor()));
  const RankIdentity identity = identity_of(messages.front());
  const bool is_ours = kind_of(messages.front()) == "hello" &&
                       text_of(messages.front(), "token") == token_ && identity.rank > 0 &&
                       identity.rank < ranks_;
  if (!is_ours) {
    return;
  }
  socket.send({{"kind", "welcome"}});
  std::optional<MessageSocket>& peer = peers_[static_cast<std::size_t>(identity.rank)];
  joined_ += peer ? 0 : 1;
  peer.emplace(std::move(socket));
  states_.join(identity, watched_);
}

void WatchThread::hear(int rank) {
  std::optional<MessageSocket>& peer = peers_[static_cast<std::size_t>(rank)];
  if (!peer) {
    return;
  }
  for (const json& message : peer->receive()) {  // also what came before a beat found it closed
    hear_message(rank, message);
  }
  if (!peer->is_open()) {
    states_.lose(rank);
  }
}

void WatchThread::hear_message(int rank, const json& message) {
  const std::string kind = kind_of(message);
  if (kind == "beat") {
    states_.beat(rank, state_of(message), watched_);
  } else if (kind == "error") {
    states_.fail(rank, state_of(message), text_of(message, "text"), watched_);
  } else if (kind == "bye") {
    states_.leave(rank);
  } else if (kind == "end" && self_.rank != 0) {
    follow(message);
  }
}

void WatchThread::beat() {
  constexpr double kShortestPause = 0.5;
  constexpr double kLongestPause = 2.0;
  constexpr double kBeatsInLimit = 10.0;
  const ProgressState state = progress_->state();
  const double pause = std::min(state.marks != told_marks_ ? kShortestPause : kLongestPause,
                                limits_.heartbeat / kBeatsInLimit);
  if (watched_ < told_at_ + pause) {
    return;
  }
  told_at_ = watched_;
  told_marks_ = state.marks;
  if (self_.rank == 0) {
    states_.beat(0, state, watched_);
  }
  tell_all(progress_message("beat", state));
}

void WatchThread::tell_all(const json& message) {
  for (std::optional<MessageSocket>& peer : peers_) {
    if (peer) {
      peer->send(message);
    }
  }
}

// False: this thread has nothing left to do.
bool WatchThread::serve_request() {
  Request request = Request::none;
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    request = std::exchange(request_, Request::none);
    text = std::exchange(request_text_, "");
  }
  switch (request) {
    case Request::none:
      return true;
    case Request::error: {
      json message = progress_message("error", progress_->state());
      message["text"] = text;
      has_announced_ = true;
      tell_all(message);
      return true;
    }
    case Request::end:
      tell_all({{"kind", "end"}, {"rank", 0}, {"text", text}});
      wait_for_ends();
      break;
    case Request::farewell:
      say_farewell();
      break;
  }
  {
    const std::lock_guard lock(mutex_);
    is_done_ = true;
  }
  done_.notify_all();
  return false;
}

// Returns when the others have ended: their connections are closed. Those that do not answer are
// given up after six seconds. That much later than the heartbeat's limit a launcher may have found
// out by itself: mpirun does not where it has something to tell to a host that is cut off (see
// launch/env.sh).
void WatchThread::wait_for_ends() {
  const double limit = std::min(6.0, limits_.heartbeat);
  const Clock::time_point begin = Clock::now();
  const auto runs = [](std::optional<MessageSocket>& peer) {
    if (peer) {
      peer->receive();
    }
    return peer && peer->is_open();
  };
  while (seconds_since(begin) < limit && std::ranges::any_of(peers_, runs)) {
    wait();
  }
}

void WatchThread::say_farewell() {
  constexpr milliseconds kLimit{500};
  tell_all({{"kind", "bye"}});
  for (std::optional<MessageSocket>& peer : peers_) {
    if (peer) {
      peer->close_politely(kLimit);
    }
  }
}

void WatchThread::end_with(const RankFault& fault) {
  if (self_.rank == 0) {
    print_error("\n" + fault.text);
    tell_all({{"kind", "end"}, {"rank", fault.rank}, {"text", fault.text}});
  } else {
    // Rank 0 is the one that is lost. The first of the others tells of it; where the launcher does
    // not end the rest by then, they say why they go.
    constexpr milliseconds kRankOneFirst{500};
    if (self_.rank > 1) {
      std::this_thread::sleep_for(kRankOneFirst);
    }
    print_error(fmt::format("\nbifocal: rank {} of {} (host {}) ends, at {}:\n",
                            self_.rank,
                            ranks_,
                            self_.host,
                            describe(progress_->state())) +
                fault.text);
  }
  wait_for_ends();
  end_process();
}

// Rank 0 has said what there is to say, but to a rank that may have a log of its own.
void WatchThread::follow(const json& message) {
  if (identity_of(message).rank == self_.rank && !has_announced_) {
    const std::string text = text_of(message, "text");
    print_error(fmt::format("bifocal: rank {} of {} (host {}) was told to end: {}\n",
                            self_.rank,
                            ranks_,
                            self_.host,
                            text.substr(0, text.find('\n'))));
  }
  end_process();
}

}  // namespace bifocal
