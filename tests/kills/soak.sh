#!/usr/bin/env bash
# A soak: the tiny run for MINUTES with random kills about every 80 s, started again each time, with
# the ranks' memory and open descriptors recorded. See kills.py.
#   tests/kills/soak.sh MINUTES [ARGUMENT of kills.py ...]
set -euo pipefail

if (($# < 1)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "[soak] usage: tests/kills/soak.sh MINUTES [ARGUMENT of kills.py ...]" >&2
  exit 2
fi
minutes=$1
shift
exec python3 "$(dirname "${BASH_SOURCE[0]}")/kills.py" --minutes "$minutes" --directory runs/soak "$@"
