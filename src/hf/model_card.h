// README.md of an exported model.
#pragma once

#include <filesystem>
#include <string>

#include "hf/export.h"

namespace bifocal {

// What the directory says about its licence: the front matter of README.md, else the first line of
// a LICENSE file. Empty where it says nothing.
std::string stated_licence(const std::filesystem::path& directory);

// Teacher and its licence, parameters, mixers by layer, origin of the weights, commit and run
// configuration.
std::string model_card(const ExportOptions& options);

}  // namespace bifocal
