// The option table as a page, docs/configuration.md.
#pragma once

#include <string>

namespace bifocal {

// Markdown: how values are given, then a table per section (key, default, values, meaning).
std::string configuration_markdown();

}  // namespace bifocal
