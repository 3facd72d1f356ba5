// Planted: a path that does not start at src/.
#pragma once

#include "vectors.h"
