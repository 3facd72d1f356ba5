// Messages over a connection of this host, whole, in parts, and what is no message.
#include "parallel/message_socket.h"

#include <array>
#include <sys/socket.h>
#include <thread>

#include <gtest/gtest.h>

namespace bifocal {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

constexpr milliseconds kLimit{2000};

// Both ends of a connection.
struct Pair {
  Pair() {
    auto [near, reason] = connect_to("127.0.0.1", listener.endpoint().port, kLimit);
    EXPECT_EQ(reason, "");
    a.emplace(std::move(*near));
    EXPECT_TRUE(wait_readable(listener.descriptor(), kLimit));
    b = listener.accept();
  }

  Listener listener;
  std::optional<MessageSocket> a;
  std::optional<MessageSocket> b;
};

std::vector<json> wait_for_messages(MessageSocket& socket) {
  wait_readable(socket.descriptor(), kLimit);
  return socket.receive();
}

TEST(MessageSocket, CarriesMessagesInOrderAndTextsThatAreNotUtf8) {
  Pair pair;
  EXPECT_TRUE(pair.b->receive().empty());
  pair.a->send({{"kind", "one"}});
  pair.a->send({{"text", "not UTF-8: \xff"}});
  std::vector<json> messages = wait_for_messages(*pair.b);
  while (messages.size() < 2 && pair.b->is_open()) {
    for (json& message : wait_for_messages(*pair.b)) {
      messages.push_back(std::move(message));
    }
  }
  ASSERT_EQ(messages.size(), 2U);
  EXPECT_EQ(messages[0], json({{"kind", "one"}}));
  EXPECT_EQ(messages[1], json({{"text", "not UTF-8: \xef\xbf\xbd"}}));
}

TEST(MessageSocket, HandsOutWhatCameBeforeTheEndAndCloses) {
  Pair pair;
  pair.a->send({{"kind", "bye"}});
  std::thread other([&] {
    while (pair.b->is_open()) {
      for (const json& message : wait_for_messages(*pair.b)) {
        EXPECT_EQ(message.value("kind", ""), "bye");
      }
    }
  });
  pair.a->close_politely(kLimit);
  other.join();
  EXPECT_FALSE(pair.a->is_open());
  EXPECT_FALSE(pair.b->is_open());
  pair.a->send({{"kind", "nothing happens"}});
}

TEST(MessageSocket, APartOfAMessageWaitsForTheRest) {
  Pair pair;
  const std::string body = R"({"kind":"beat"})";
  const std::string bytes = std::string("\0\0\0\x0f", 4) + body;
  ASSERT_EQ(body.size(), 15U);
  for (const char byte : bytes.substr(0, bytes.size() - 1)) {
    ASSERT_EQ(send(pair.a->descriptor(), &byte, 1, 0), 1);
    EXPECT_TRUE(wait_for_messages(*pair.b).empty());
  }
  ASSERT_EQ(send(pair.a->descriptor(), &bytes.back(), 1, 0), 1);
  EXPECT_EQ(wait_for_messages(*pair.b), std::vector<json>{json({{"kind", "beat"}})});
}

TEST(MessageSocket, ClosesForWhatIsNoMessage) {
  const std::array<std::string, 3> strange{"GET / HTTP/1.1\r\n\r\n",  // a length of 1.2 GB
                                           std::string("\0\0\0\x01{", 5),
                                           std::string("\0\0\0\x02[]", 6)};
  for (const std::string& bytes : strange) {
    Pair pair;
    ASSERT_EQ(send(pair.a->descriptor(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
    EXPECT_TRUE(wait_for_messages(*pair.b).empty());
    EXPECT_FALSE(pair.b->is_open());
  }
}

// A stopped process does not read: its peer must neither wait nor send half a message.
TEST(MessageSocket, ClosesWhereNobodyReads) {
  Pair pair;
  const json message{{"text", std::string(60000, 'x')}};
  for (int i = 0; i < 1000 && pair.a->is_open(); ++i) {
    pair.a->send(message);
  }
  EXPECT_FALSE(pair.a->is_open());
}

TEST(Connection, NamesWhyItFails) {
  std::uint16_t port = 0;
  {
    const Listener listener;
    port = listener.endpoint().port;
    EXPECT_EQ(listener.endpoint().addresses.back(), "127.0.0.1");
  }
  const auto [socket, reason] = connect_to("127.0.0.1", port, kLimit);
  EXPECT_FALSE(socket);
  EXPECT_EQ(reason, "Connection refused");
  EXPECT_FALSE(connect_to("not an address", port, kLimit).first);
}

}  // namespace
}  // namespace bifocal
