// Event files, byte by byte; tests/python/event_file_test.py reads them with the tensorboard
// package.
#include "train/event_file.h"

#include <cstring>

#include <gtest/gtest.h>

#include "core/file.h"
#include "support/temporary_directory.h"

namespace bifocal {
namespace {

TEST(EventFile, Crc32cOfTheStandardsExamples) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);            // the check value of the polynomial
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43U);
}

// One record at `at`: its bytes. Moves `at` behind it and checks the length.
std::string take_record(const std::string& text, std::size_t& at) {
  std::uint64_t length = 0;
  std::memcpy(&length, text.data() + at, sizeof(length));
  const std::string event = text.substr(at + 12, length);
  EXPECT_EQ(event.size(), length);
  at += 12 + length + 4;
  return event;
}

TEST(EventFile, HoldsTheVersionThenOneRecordAStep) {
  const test::TemporaryDirectory directory;
  EventFile events(directory.path("events"), 200);
  events.write(300, {{"loss", 0.5}, {"rate", 1e-3}});
  events.write(301, {{"loss", 0.25}});
  const std::string text = read_file(events.path());
  std::size_t at = 0;
  EXPECT_NE(take_record(text, at).find("brain.Event:2"), std::string::npos);
  // Step 200, then a session log (field 7, two bytes) whose status (field 1) is START.
  EXPECT_NE(take_record(text, at).find(std::string("\x10\xc8\x01\x3a\x02\x08\x01", 7)),
            std::string::npos);
  const std::string first = take_record(text, at);
  // Step 300 as a varint of field 2, then the tags.
  EXPECT_NE(first.find(std::string("\x10\xac\x02", 3)), std::string::npos);
  EXPECT_NE(first.find("loss"), std::string::npos);
  EXPECT_NE(first.find("rate"), std::string::npos);
  // 0.5F is 0x3f000000, after the key of a fixed32 of field 2.
  EXPECT_NE(first.find(std::string("\x15\x00\x00\x00\x3f", 5)), std::string::npos);
  EXPECT_EQ(take_record(text, at).find("rate"), std::string::npos);
  EXPECT_EQ(at, text.size());
}

}  // namespace
}  // namespace bifocal
