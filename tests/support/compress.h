// Texts compressed for tests.
#pragma once

#include <string>
#include <string_view>
#include <zlib.h>
#include <zstd.h>

#include <gtest/gtest.h>

namespace bifocal::test {

// One gzip member.
inline std::string gzip(std::string_view text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(packed.size() - stream.avail_out);
  deflateEnd(&stream);
  return packed;
}

// One zstd frame, with a checksum of its content.
inline std::string zstd(std::string_view text) {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  const std::size_t size =
      ZSTD_compress2(context, packed.data(), packed.size(), text.data(), text.size());
  ZSTD_freeCCtx(context);
  EXPECT_EQ(ZSTD_isError(size), 0U);
  packed.resize(size);
  return packed;
}

// A zstd frame that readers must pass over.
inline std::string zstd_skippable(std::string_view content) {
  std::string frame = "\x5a\x2a\x4d\x18";
  for (unsigned shift = 0; shift < 32; shift += 8) {
    frame += static_cast<char>(content.size() >> shift & 0xFFU);
  }
  return frame.append(content);
}

}  // namespace bifocal::test
