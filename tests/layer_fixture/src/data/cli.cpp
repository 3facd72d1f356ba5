// Planted: nobody includes cli.
#include "cli/commands.h"
