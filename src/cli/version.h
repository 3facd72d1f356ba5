// What `bifocal --version` prints.
#pragma once

#include <string>

namespace bifocal {

// Commit, build options, compiler, and versions of the libraries that are linked.
std::string version_text();

// The commit that this was built from.
std::string commit_text();

}  // namespace bifocal
