#!/usr/bin/env bash
# Runs the program on N ranks of this machine.
#   launch/local.sh N COMMAND [ARGUMENT ...]      as in: launch/local.sh 2 train --config run.toml
# BIFOCAL names another binary than build/cpu/bifocal; OMP_NUM_THREADS overrides threads per rank.
# With run.device = "cuda" each rank takes the GPU of its number: N is at most the number of GPUs.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if (($# < 2)) || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  echo "[local] usage: launch/local.sh N COMMAND [ARGUMENT ...], N ranks from 1 on" >&2
  exit 2
fi
ranks=$1
shift
binary=${BIFOCAL:-$root/build/cpu/bifocal}
if [[ ! -x $binary ]]; then
  echo "[local] no program at $binary: build it first (cmake --preset cpu && cmake --build" \
    "--preset cpu), or name another in BIFOCAL" >&2
  exit 1
fi

# shellcheck source=launch/env.sh
source "$root/launch/env.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(bifocal_threads "$ranks")}"

# Open MPI binds a rank to one core by default, which would put all its threads there.
flags=(--bind-to none)
if ((ranks > $(nproc))); then
  flags+=(--oversubscribe)
fi
exec mpirun -n "$ranks" "${flags[@]}" "$binary" "$@"
