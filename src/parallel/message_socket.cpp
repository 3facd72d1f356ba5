// Linux's sockets.
#include "parallel/message_socket.h"

#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <system_error>
#include <unistd.h>

#include "core/error.h"
#include "core/process.h"

namespace bifocal {

namespace {

using std::chrono::milliseconds;

constexpr std::size_t kHeader = 4;
constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // of a message; longer is not ours

std::string reason_of(int error) {
  return std::generic_category().message(error);
}

bool wait_for(int descriptor, std::int16_t events, milliseconds limit) {
  pollfd entry{.fd = descriptor, .events = events, .revents = 0};
  return poll(&entry, 1, static_cast<int>(limit.count())) > 0;
}

// The numeric form of an address of this host that others may reach; empty for others.
std::string text_of(const ifaddrs& interface) {
  const sockaddr* address = interface.ifa_addr;
  const bool is_up =
      (interface.ifa_flags & IFF_UP) != 0 && (interface.ifa_flags & IFF_LOOPBACK) == 0;
  if (address == nullptr || !is_up) {
    return {};
  }
  std::array<char, NI_MAXHOST> text{};
  socklen_t size = sizeof(sockaddr_in);
  if (address->sa_family == AF_INET6) {
    // Link-local addresses mean something else on each host.
    const auto* wide = reinterpret_cast<const sockaddr_in6*>(address);
    if (IN6_IS_ADDR_LINKLOCAL(&wide->sin6_addr)) {
      return {};
    }
    size = sizeof(sockaddr_in6);
  } else if (address->sa_family != AF_INET) {
    return {};
  }
  const int failed =
      getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return failed == 0 ? text.data() : "";
}

// IPv4 first; the loopback last, for ranks of this host where nothing else is up.
std::vector<std::string> addresses_of_host() {
  std::vector<std::string> addresses;
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) == 0) {
    for (const ifaddrs* at = first; at != nullptr; at = at->ifa_next) {
      if (std::string text = text_of(*at); !text.empty()) {
        addresses.push_back(std::move(text));
      }
    }
    freeifaddrs(first);
  }
  std::stable_partition(addresses.begin(), addresses.end(), [](const std::string& address) {
    return address.find(':') == std::string::npos;
  });
  addresses.emplace_back("127.0.0.1");
  return addresses;
}

Descriptor open_socket(int family) {
  return Descriptor(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

// Listens on a free port of both families, or of IPv4 where the system has no IPv6.
Descriptor listen_anywhere() {
  const sockaddr_in6 both{.sin6_family = AF_INET6,
                          .sin6_port = 0,
                          .sin6_flowinfo = 0,
                          .sin6_addr = IN6ADDR_ANY_INIT,
                          .sin6_scope_id = 0};
  Descriptor wide = open_socket(AF_INET6);
  const int off = 0;
  if (wide.number() >= 0 &&
      setsockopt(wide.number(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0 &&
      bind(wide.number(), reinterpret_cast<const sockaddr*>(&both), sizeof both) == 0 &&
      listen(wide.number(), SOMAXCONN) == 0) {
    return wide;
  }
  sockaddr_in any{};
  any.sin_family = AF_INET;
  Descriptor narrow = open_socket(AF_INET);
  BIFOCAL_REQUIRE(
      narrow.number() >= 0 &&
          bind(narrow.number(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0 &&
          listen(narrow.number(), SOMAXCONN) == 0,
      "[watch] the system lets no TCP port be opened: {}",
      reason_of(errno));
  return narrow;
}

std::uint16_t port_of(const Descriptor& socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  BIFOCAL_REQUIRE(getsockname(socket.number(), reinterpret_cast<sockaddr*>(&storage), &size) == 0,
                  "[watch] the system does not name a TCP port that it opened: {}",
                  reason_of(errno));
  return ntohs(storage.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) {
    ::close(number_);
  }
}

MessageSocket::MessageSocket(Descriptor connection) : connection_(std::move(connection)) {
  const int on = 1;
  setsockopt(connection_.number(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void MessageSocket::send(const nlohmann::json& message) {
  if (!is_open()) {
    return;
  }
  const std::string body = message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const std::uint32_t length = htonl(static_cast<std::uint32_t>(body.size()));
  std::string bytes(reinterpret_cast<const char*>(&length), kHeader);
  bytes += body;
  ssize_t sent = -1;
  do {
    sent = ::send(descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(bytes.size())) {
    read_arrived();  // the last words of the other side are for receive()
    close();         // a part of a message would make the rest unreadable
  }
}

void MessageSocket::read_arrived() {
  std::array<char, 4096> buffer{};
  bool is_over = false;
  while (is_open() && !is_over) {
    const ssize_t got = recv(descriptor(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got > 0) {
      unread_.append(buffer.data(), static_cast<std::size_t>(got));
    } else if (got < 0 && errno == EINTR) {
      continue;
    } else {
      is_over = true;
      if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) {
        close();
      }
    }
  }
}

std::vector<nlohmann::json> MessageSocket::receive() {
  read_arrived();
  std::vector<nlohmann::json> messages;
  std::size_t at = 0;
  while (unread_.size() - at >= kHeader) {
    std::uint32_t length = 0;
    unread_.copy(reinterpret_cast<char*>(&length), kHeader, at);
    length = ntohl(length);
    if (length <= kMostBytes && unread_.size() - at - kHeader < length) {
      break;
    }
    nlohmann::json message =
        length > kMostBytes
            ? nlohmann::json(nlohmann::json::value_t::discarded)
            : nlohmann::json::parse(unread_.substr(at + kHeader, length), nullptr, false);
    if (!message.is_object()) {
      close();
      unread_.clear();
      return messages;
    }
    messages.push_back(std::move(message));
    at += kHeader + length;
  }
  unread_.erase(0, at);
  return messages;
}

void MessageSocket::close_politely(milliseconds limit) {
  if (!is_open()) {
    return;
  }
  shutdown(descriptor(), SHUT_WR);
  const auto end = std::chrono::steady_clock::now() + limit;
  while (is_open() && std::chrono::steady_clock::now() < end) {
    constexpr milliseconds kPause{20};
    wait_readable(descriptor(), kPause);
    receive();
  }
  close();
}

std::string describe(const Endpoint& endpoint) {
  std::string text;
  for (const std::string& address : endpoint.addresses) {
    text += address + ", ";
  }
  return fmt::format("{}port {}", text, endpoint.port);
}

Listener::Listener() : socket_(listen_anywhere()) {
  endpoint_ = {.host = host_name(), .addresses = addresses_of_host(), .port = port_of(socket_)};
}

std::optional<MessageSocket> Listener::accept() {
  Descriptor connection(accept4(socket_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.number() < 0) {
    return std::nullopt;
  }
  return MessageSocket(std::move(connection));
}

std::pair<std::optional<MessageSocket>, std::string> connect_to(const std::string& address,
                                                                std::uint16_t port,
                                                                milliseconds limit) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
      error != 0) {
    return {std::nullopt, gai_strerror(error)};
  }
  Descriptor connection = open_socket(found->ai_family);
  int failed = connection.number() < 0 ? errno : 0;
  if (failed == 0 && connect(connection.number(), found->ai_addr, found->ai_addrlen) != 0) {
    failed = errno;
  }
  freeaddrinfo(found);
  if (failed == EINPROGRESS) {
    if (!wait_writable(connection.number(), limit)) {
      return {std::nullopt, reason_of(ETIMEDOUT)};
    }
    socklen_t size = sizeof failed;
    getsockopt(connection.number(), SOL_SOCKET, SO_ERROR, &failed, &size);
  }
  if (failed != 0) {
    return {std::nullopt, reason_of(failed)};
  }
  return {MessageSocket(std::move(connection)), ""};
}

bool wait_readable(int descriptor, milliseconds limit) {
  return wait_for(descriptor, POLLIN, limit);
}

bool wait_writable(int descriptor, milliseconds limit) {
  return wait_for(descriptor, POLLOUT, limit);
}

}  // namespace bifocal
