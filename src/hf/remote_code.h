// The Python files with which Hugging Face transformers loads an exported student.
#pragma once

#include <span>
#include <string_view>

namespace bifocal {

struct RemoteFile {
  std::string_view name;
  std::string_view text;
};

// src/hf/python/, compiled into the program: an export needs no source tree.
std::span<const RemoteFile> remote_code();

}  // namespace bifocal
