#!/usr/bin/env bash
# One of two ranks leaves in the middle of a collective on the GPUs: killed under a launcher that
# ends the job, killed under one that does not care, stopped, and by an exception. Each time the job
# must end within 60 s with an error and a text that says why, and leave no process.
#   nccl_fault.sh MPIEXEC PROGRAM
# Exit status 77 where there are no two GPUs.
set -uo pipefail

mpiexec=$1
program=$2
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
failures=0

report() {
  echo "FAILED $1"
  sed 's/^/    /' "$directory/log"
  failures=$((failures + 1))
}

# Whether a process runs; one that nobody collects has ended.
runs() {
  local state
  state=$(sed -n 's/^State:[[:space:]]*\(.\).*/\1/p' "/proc/$1/status" 2>/dev/null)
  [[ -n $state && $state != Z ]]
}

# expect NAME WAY TEXT [FLAG ...]: flags are for the launcher. One that is told to go on after a
# failure reports success.
expect() {
  local name=$1 way=$2 text=$3 begin=$SECONDS status elapsed rank pid
  shift 3
  timeout --kill-after=5 60 "$mpiexec" -n 2 "$@" "$program" "$way" "$directory" \
    >"$directory/log" 2>&1
  status=$?
  elapsed=$((SECONDS - begin))
  if ((status == 77)) || grep -q 'wants 2 ranks and 2 GPUs' "$directory/log"; then
    cat "$directory/log"
    exit 77
  fi
  if ((status == 0)) && [[ $* != *--enable-recovery* ]]; then
    report "$name: exit status 0"
  elif ((status == 124 || status == 137)) && ((elapsed >= 60)); then
    report "$name: still running after 60 s"
  elif ! grep -q -E "$text" "$directory/log"; then
    report "$name: no text like '$text'"
  else
    echo "passed $name: exit status $status after $elapsed s:"
    grep -m 1 -E "$text" "$directory/log" | sed 's/^/    /'
  fi
  for rank in 0 1; do
    read -r pid <"$directory/$rank"
    if runs "$pid"; then
      sleep 2
    fi
    if runs "$pid"; then
      report "$name: process $pid of rank $rank is left"
      kill -KILL "$pid"
    fi
  done
}

expect "killed" kill 'signal 9|has ended while'
expect "killed, and the launcher does not care" kill \
  'rank 0 of 2 on .*: rank 1 \(process [0-9]+ on this host\) has ended while all_gather' \
  --enable-recovery
BIFOCAL_NCCL_TIMEOUT=10 expect "stopped" stop 'all_gather of .* has not ended within 10 s'
expect "an exception" throw 'an error of rank 1'

if ((failures > 0)); then
  echo "$failures failures"
  exit 1
fi
