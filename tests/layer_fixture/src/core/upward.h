// Planted: a lower layer includes a higher one.
#pragma once

#include "ops/linear.h"
