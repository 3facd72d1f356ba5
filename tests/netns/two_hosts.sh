#!/usr/bin/env bash
# The tiny run on two hosts, one rank each, over TCP: its losses are those of two ranks of one host;
# then the second host is cut off in the middle of a run, and both sides must end within 60 s, with an
# error, and leave no process.
#   two_hosts.sh PROGRAM      (the bifocal to run)
# Exit status 77 where the machine permits no network namespaces.
set -euo pipefail

program=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/netns/lib.sh
source tests/netns/lib.sh
# shellcheck source=/dev/null  # launch/env.sh is checked by itself
source launch/env.sh
export OMP_NUM_THREADS=1 BIFOCAL_NETNS_B=$netns_b
directory=$(mktemp -d)
export directory program
trap 'netns_down; rm -rf "$directory"' EXIT
netns_up

fail() {
  echo "FAILED $1" >&2
  tail -n 20 "$directory"/*.log "$directory"/err.* >&2 || true
  exit 1
}

# words NAME OPTION...: the command line of a rank, whose words and exit status lie in files.
# shellcheck disable=SC2016  # the ranks' shells expand them
rank='cd "$0"; "$program" "$@" >"$directory/out.$OMPI_COMM_WORLD_RANK" 2>"$directory/err.$OMPI_COMM_WORLD_RANK"
status=$?
echo "$status" >"$directory/status.$OMPI_COMM_WORLD_RANK"
exit "$status"'
words() {
  local name=$1
  shift
  printf '%s\0' bash -c "$rank" "$PWD" train --config configs/tiny/bifocal.toml \
    --data.train "$directory/data" --run.directory "$directory/$name" --data.row_tokens 128 \
    --student.budget 48 --align.steps 4 "$@"
}

# What tells the hosts apart goes to mpirun: who is called in place of ssh, and the network.
two_hosts=(--host "$address_a:1,$address_b:1" --mca plm_rsh_agent "$PWD/tests/netns/agent.sh"
  --mca btl "tcp,self" --bind-to none -x directory -x program)

losses() {
  sed -n 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/p' "$directory/$1/metrics.jsonl"
}

"$program" synth register-machine --count 60 --seed 1 --output "$directory/problems.jsonl" >/dev/null
"$program" tokenize "$directory/problems.jsonl" --output "$directory/data" \
  --tokenizer data/register-machine/teacher/tokenizer.json >/dev/null

mapfile -d '' -t line < <(words one --distill.steps 8)
mpirun -n 2 --oversubscribe --bind-to none "${line[@]}" >"$directory/one.log" 2>&1 || fail "one host"
mapfile -d '' -t line < <(words two --distill.steps 8)
netns_on a timeout 120 mpirun -n 2 "${two_hosts[@]}" "${line[@]}" >"$directory/two.log" 2>&1 ||
  fail "two hosts"
if [[ $(losses one | wc -l) != 12 || $(losses one) != "$(losses two)" ]]; then
  diff <(losses one) <(losses two) >&2 || true
  fail "the losses on two hosts are not those on one"
fi
echo "passed: 12 steps on two hosts have the losses of one host, bit for bit"

rm "$directory"/status.*
mapfile -d '' -t line < <(words cut --distill.steps 1000000)
netns_on a timeout 200 mpirun -n 2 "${two_hosts[@]}" "${line[@]}" >"$directory/cut.log" 2>&1 &
launcher=$!
for ((second = 0; second < 60; ++second)); do
  [[ -f $directory/cut/metrics.jsonl ]] && (($(losses cut | wc -l) > 6)) && break
  sleep 1
done
((second < 60)) || fail "no steps within 60 s"
sleep 3 # a few beats
ip -n "$netns_b" link set veth-b down
cut=$SECONDS
status=0
wait "$launcher" || status=$?
until [[ -z $(ip netns pids "$netns_a")$(ip netns pids "$netns_b") ]]; do
  ((SECONDS - cut <= 60)) || fail "processes run 60 s after the cut"
  sleep 0.5
done
elapsed=$((SECONDS - cut))
((elapsed <= 60)) || fail "mpirun took $elapsed s"
((status != 0)) || fail "mpirun's exit status is 0"
# A rank that its daemon kills leaves no status.
for rank in 0 1; do
  [[ $(cat "$directory/status.$rank" 2>/dev/null || echo killed) != 0 ]] ||
    fail "rank $rank: exit status 0"
done
grep -q 'rank 1 of 2 does not answer' "$directory/err.0" || fail "rank 0 does not say why"
grep -q 'place: step [0-9]* of distill, ' "$directory/err.0" || fail "rank 0 does not say where"
grep -q 'rank 0 of 2 does not answer' "$directory/err.1" || fail "rank 1 does not say why"
echo "passed: mpirun and both ranks ended $elapsed s after the cut, mpirun with status $status; rank 0 said:"
tail -n 4 "$directory/err.0"
