// SHA-256 by OpenSSL's EVP interface.
#include "core/sha256.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "core/error.h"

namespace bifocal {

struct Sha256::State {
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };

  std::unique_ptr<EVP_MD_CTX, Free> context{EVP_MD_CTX_new()};
};

namespace {

void check_openssl(int success, const char* call) {
  if (success != 1) {
    fail_call("openssl", call, "SHA-256 is not available", std::source_location::current());
  }
}

}  // namespace

Sha256::Sha256() : state_(std::make_unique<State>()) {
  check_openssl(EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr),
                "EVP_DigestInit_ex");
}

Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::add(const void* data, std::size_t bytes) {
  check_openssl(EVP_DigestUpdate(state_->context.get(), data, bytes), "EVP_DigestUpdate");
}

std::string Sha256::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int length = 0;
  check_openssl(EVP_DigestFinal_ex(state_->context.get(), digest.data(), &length),
                "EVP_DigestFinal_ex");
  std::string text;
  for (unsigned int i = 0; i < length; ++i) {
    text += fmt::format("{:02x}", digest.at(i));
  }
  return text;
}

std::string sha256_hex(std::string_view text) {
  Sha256 hash;
  hash.add(text.data(), text.size());
  return hash.hex();
}

std::string sha256_hex_of_file(const std::filesystem::path& path) {
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  const std::unique_ptr<std::FILE, Close> file(std::fopen(path.c_str(), "rb"));
  BIFOCAL_REQUIRE(
      file != nullptr, "[file] cannot open {}: {}", path.string(), std::strerror(errno));
  Sha256 hash;
  std::vector<char> buffer(std::size_t{1} << 20);
  while (const std::size_t bytes = std::fread(buffer.data(), 1, buffer.size(), file.get())) {
    hash.add(buffer.data(), bytes);
  }
  BIFOCAL_REQUIRE(std::ferror(file.get()) == 0,
                  "[file] cannot read {}: {}",
                  path.string(),
                  std::strerror(errno));
  return hash.hex();
}

}  // namespace bifocal
