#!/usr/bin/env bash
# What mpirun calls instead of ssh: agent.sh ADDRESS COMMAND..., the words of a shell's line.
set -euo pipefail

# shellcheck source=tests/netns/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
netns_b=$BIFOCAL_NETNS_B
if [[ $1 != "$address_b" ]]; then
  echo "[netns] mpirun asks for host $1, which is not $address_b" >&2
  exit 1
fi
shift
netns_on b bash -c "$*"
