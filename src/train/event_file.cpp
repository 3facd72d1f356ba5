// Protocol buffers by hand: two messages of four fields are less than a library that makes them.
#include "train/event_file.h"

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <unistd.h>

#include <fmt/format.h>

#include "core/error.h"
#include "core/process.h"

namespace bifocal {

namespace {

// The table of the reflected polynomial 0x1EDC6F41.
constexpr std::array<std::uint32_t, 256> make_crc_table() {
  constexpr std::uint32_t kReflected = 0x82F63B78U;
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder >> 1) ^ ((remainder & 1U) != 0 ? kReflected : 0U);
    }
    table.at(byte) = remainder;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kCrcTable = make_crc_table();

template <class T>
void append_fixed(std::string& text, T value) {
  static_assert(std::endian::native == std::endian::little);
  std::array<char, sizeof(T)> bytes{};
  std::memcpy(bytes.data(), &value, sizeof(T));
  text.append(bytes.data(), bytes.size());
}

void append_varint(std::string& text, std::uint64_t value) {
  while (value >= 0x80U) {
    text.push_back(static_cast<char>((value & 0x7FU) | 0x80U));
    value >>= 7;
  }
  text.push_back(static_cast<char>(value));
}

enum class Wire : std::uint8_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

void append_key(std::string& text, std::uint64_t field, Wire wire) {
  append_varint(text, (field << 3) | static_cast<std::uint64_t>(wire));
}

void append_bytes(std::string& text, std::uint64_t field, std::string_view bytes) {
  append_key(text, field, Wire::bytes);
  append_varint(text, bytes.size());
  text.append(bytes);
}

// Fields of Event (tensorflow/core/util/event.proto) and Summary (framework/summary.proto).
constexpr std::uint64_t kWallTime = 1;
constexpr std::uint64_t kStep = 2;
constexpr std::uint64_t kFileVersion = 3;
constexpr std::uint64_t kSummary = 5;
constexpr std::uint64_t kSessionLog = 7;
constexpr std::uint64_t kStatus = 1;       // of SessionLog
constexpr std::uint64_t kStart = 1;        // a status
constexpr std::uint64_t kValue = 1;        // of Summary
constexpr std::uint64_t kTag = 1;          // of Summary.Value
constexpr std::uint64_t kSimpleValue = 2;  // of Summary.Value

std::string event_now() {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  std::string event;
  append_key(event, kWallTime, Wire::fixed64);
  append_fixed(event, now.count());
  return event;
}

// TFRecord stores checksums rotated and shifted, so that a checksum of data that holds checksums
// stays useful.
std::uint32_t masked_crc(std::string_view bytes) {
  constexpr std::uint32_t kMaskDelta = 0xa282ead8U;
  return std::rotr(crc32c(bytes), 15) + kMaskDelta;
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc = (crc >> 8) ^ kCrcTable.at((crc ^ static_cast<std::uint8_t>(byte)) & 0xFFU);
  }
  return ~crc;
}

EventFile::EventFile(const std::filesystem::path& directory, std::int64_t first_step) {
  std::filesystem::create_directories(directory);
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(
      std::chrono::system_clock::now().time_since_epoch());
  path_ = directory /
          fmt::format("events.out.tfevents.{:010}.{}.{}", seconds.count(), host_name(), ::getpid());
  stream_.open(path_, std::ios::binary | std::ios::app);
  BIFOCAL_REQUIRE(stream_.is_open(),
                  "[events] wanted to write {}, got: {}: check the directory and its rights",
                  path_.string(),
                  std::generic_category().message(errno));
  std::string event = event_now();
  append_bytes(event, kFileVersion, "brain.Event:2");
  append(event);
  std::string start;
  append_key(start, kStatus, Wire::varint);
  append_varint(start, kStart);
  std::string session = event_now();
  append_key(session, kStep, Wire::varint);
  append_varint(session, static_cast<std::uint64_t>(first_step));
  append_bytes(session, kSessionLog, start);
  append(session);
}

void EventFile::write(std::int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    std::string entry;
    append_bytes(entry, kTag, tag);
    append_key(entry, kSimpleValue, Wire::fixed32);
    append_fixed(entry, static_cast<float>(value));
    append_bytes(summary, kValue, entry);
  }
  std::string event = event_now();
  append_key(event, kStep, Wire::varint);
  append_varint(event, static_cast<std::uint64_t>(step));
  append_bytes(event, kSummary, summary);
  append(event);
}

void EventFile::append(const std::string& event) {
  std::string record;
  append_fixed(record, static_cast<std::uint64_t>(event.size()));
  append_fixed(record, masked_crc(record));
  record += event;
  append_fixed(record, masked_crc(event));
  stream_.write(record.data(), static_cast<std::streamsize>(record.size()));
  stream_.flush();
  BIFOCAL_REQUIRE(stream_.good(),
                  "[events] writing {} failed: {}: check the space left",
                  path_.string(),
                  std::generic_category().message(errno));
}

}  // namespace bifocal
