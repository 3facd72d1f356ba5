// Messages of JSON over TCP, for the threads that watch over ranks. Nothing here waits, but
// connect_to() and close_politely(), which are bounded.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace bifocal {

// An open file descriptor, closed at the end.
class Descriptor {
 public:
  Descriptor() = default;

  explicit Descriptor(int number) : number_(number) {}

  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}

  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  ~Descriptor();

  int number() const { return number_; }

 private:
  int number_ = -1;
};

// One end of a connection. A message is an object of JSON behind its length (4 bytes, big-endian).
class MessageSocket {
 public:
  // connection: of TCP, established.
  explicit MessageSocket(Descriptor connection);

  // Hands the message to the system, or closes where the other side has not read for so long that
  // there is no room. Bytes that are not UTF-8 arrive as U+FFFD.
  void send(const nlohmann::json& message);

  // The messages that have arrived since the last call; closes at the end of the connection, and
  // for bytes that are no message.
  std::vector<nlohmann::json> receive();

  // Says that nothing will follow and reads until the other side has closed or the time is over:
  // without that, unread data would make the system drop what was sent.
  void close_politely(std::chrono::milliseconds limit);

  bool is_open() const { return connection_.number() >= 0; }

  // Of the open connection, for poll().
  int descriptor() const { return connection_.number(); }

 private:
  // Takes what has arrived; closes at the end of the connection.
  void read_arrived();

  void close() { connection_ = Descriptor(); }

  Descriptor connection_;
  std::string unread_;
};

// Where a rank listens.
struct Endpoint {
  std::string host;
  std::vector<std::string> addresses;  // numeric, the likeliest to be reached first
  std::uint16_t port = 0;
};

// "10.0.0.1, fd00::1, port 4000"
std::string describe(const Endpoint& endpoint);

// Accepts connections on a free port, at every address of this host. Throws Error where the system
// refuses.
class Listener {
 public:
  Listener();

  const Endpoint& endpoint() const { return endpoint_; }

  int descriptor() const { return socket_.number(); }

  // Empty when nobody waits.
  std::optional<MessageSocket> accept();

 private:
  Descriptor socket_;
  Endpoint endpoint_;
};

// Connects to one address, numeric; waits for at most `limit`. Returns the reason where it failed.
std::pair<std::optional<MessageSocket>, std::string> connect_to(const std::string& address,
                                                                std::uint16_t port,
                                                                std::chrono::milliseconds limit);

// Whether the descriptor can be read (or written) within the limit. Interruptions by signals end
// the wait early.
bool wait_readable(int descriptor, std::chrono::milliseconds limit);
bool wait_writable(int descriptor, std::chrono::milliseconds limit);

}  // namespace bifocal
