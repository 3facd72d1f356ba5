#!/usr/bin/env bash
# launch/slurm.sbatch under a real Slurm: this host as two nodes, with daemons, keys, ports and state
# of its own in a temporary directory. Jobs have two ranks, one a node.
# - Stopped by a signal to the batch script, and again by one to the ranks, under srun and under mpirun:
#   each time the job requeues itself and goes on, and in the end all that metrics.jsonl has of every
#   step, clocks aside, is what an unbroken run without Slurm has.
# - Slurm's own warning before the time limit does the same.
# - launch/reproduce.sh submits the whole recipe for one student at tiny size, each job after those that it
#   needs, and all of them succeed.
# - A job that is cancelled saves and stays away; one that loses a rank fails within a minute.
#   tests/slurm/run.sh            about three minutes on two cores
# Wants Debian's slurm-wlm and munge (launch/setup.sh --dev) and the program, which it builds; needs no
# root, no cgroups and no network but the loopback. BIFOCAL names another program.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
for tool in munged slurmctld slurmd sbatch srun scontrol; do
  if ! PATH=$PATH:/usr/sbin command -v "$tool" >/dev/null; then
    echo "[slurm] no $tool on this machine: install slurm-wlm and munge (launch/setup.sh --dev)" >&2
    exit 1
  fi
done
PATH=$PATH:/usr/sbin
export BIFOCAL=${BIFOCAL:-$root/build/cpu/bifocal}
# The second "node" is this host too: nothing may bind its ranks to the first cores once more.
export BIFOCAL_BIND=none BIFOCAL_INTERFACE=lo OMP_NUM_THREADS=1
begin=$SECONDS
directory=$(mktemp -d)
export SLURM_CONF=$directory/slurm.conf
daemons=()
steps=60

# Ends the daemons that were started here, and what they started: all that has this SLURM_CONF in its
# environment, but for this script and its own.
clean() {
  local status=$? pid
  trap - EXIT
  if ((status != 0)); then
    echo "[slurm] FAILED; the last lines of every log:" >&2
    tail -n 25 "$directory"/*.log >&2 || true
  fi
  scancel --full --signal=KILL --user="$(id -un)" 2>/dev/null || true
  scancel --user="$(id -un)" 2>/dev/null || true
  for pid in "${daemons[@]}"; do
    kill "$pid" 2>/dev/null || true
  done
  for pid in $(holders); do
    kill -KILL "$pid" 2>/dev/null || true
  done
  wait
  rm -rf "$directory"
  exit "$status"
}
trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Processes of ours in other sessions than this script's.
holders() {
  local file pid
  for file in /proc/[0-9]*/environ; do
    pid=${file#/proc/}
    pid=${pid%/environ}
    if ((pid != $$ && pid != BASHPID)) && grep -qz "^SLURM_CONF=$SLURM_CONF\$" "$file" 2>/dev/null &&
      [[ $(ps -o ppid= -p "$pid" | tr -d ' ') != "$$" ]]; then
      echo "$pid"
    fi
  done
}

say() {
  echo "[slurm] $((SECONDS - begin)) s: $*"
}

fail() {
  echo "[slurm] FAILED: $*" >&2
  exit 1
}

# until SECONDS WHAT COMMAND ...: waits for the command to succeed.
until_true() {
  local limit=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < limit)) || fail "waited in vain until $what"
    sleep 0.2
  done
}

# A port of the loopback on which nobody listens, from $1 on.
free_port() {
  local port=$1
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    port=$((port + 1))
  done
  echo "$port"
}

start_munge() {
  local munge=$directory/munge
  mkdir -m 700 "$munge"
  # Munge wants every folder above its socket to be safe; --force turns that into warnings.
  head -c 1024 /dev/urandom >"$munge/key"
  chmod 400 "$munge/key"
  munged --foreground --force --key-file="$munge/key" --socket="$munge/socket" \
    --pid-file="$munge/pid" --seed-file="$munge/seed" --log-file="$munge/log" \
    >"$directory/munged.log" 2>&1 &
  daemons+=($!)
  until_true 20 "munge answers" munge --socket="$munge/socket" --no-input
}

# Debian's Slurm 22.05 and Open MPI 4.1 as a user who is alone: no cgroups, no accounting. PMIx puts
# each node's sockets below TmpFS, so nodes of one host need two of them.
write_slurm_conf() {
  local user host port
  user=$(id -un)
  host=$(hostname -s)
  port=$(free_port $((20000 + RANDOM % 10000)))
  mkdir -p "$directory"/{state,spool-a,spool-b,tmp-a,tmp-b}
  cat >"$SLURM_CONF" <<CONF
ClusterName=bifocal
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$directory/munge/socket
CredType=cred/munge
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/spool-%n
SlurmctldPidFile=$directory/slurmctld.pid
SlurmdPidFile=$directory/slurmd-%n.pid
TmpFS=$directory/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=a NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port $((port + 1))) CPUs=2
NodeName=b NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port $((port + 2))) CPUs=2
PartitionName=all Nodes=a,b Default=YES MaxTime=INFINITE State=UP
CONF
}

nodes_are_idle() {
  [[ $(sinfo --noheader --format=%T --nodes=a,b | sort -u) == idle ]]
}

start_slurm() {
  local node
  start_munge
  write_slurm_conf
  slurmctld -D >"$directory/slurmctld.log" 2>&1 &
  daemons+=($!)
  for node in a b; do
    slurmd -D -N "$node" >"$directory/slurmd-$node.log" 2>&1 &
    daemons+=($!)
  done
  until_true 60 "both nodes are idle" nodes_are_idle
}

# Options of run $1 with $2 steps.
options() {
  printf '%s\n' --config configs/tiny/bifocal.toml --run.directory "$1" \
    --data.train "$directory/data" --data.row_tokens 512 --align.steps 20 \
    --distill.steps $(($2 - 20)) --mesh.data 1 --mesh.sequence 2
}

# Steps that a run has finished.
steps_of() {
  if [[ -f $1/metrics.jsonl ]]; then grep -vc '"event"' "$1/metrics.jsonl" || true; else echo 0; fi
}

has_steps() {
  (($(steps_of "$1") >= $2))
}

# A pattern of the command lines of a run's ranks.
ranks_of() {
  echo "$BIFOCAL train .*--run.directory $1 .*"
}

# submit RUN STEPS [OPTION OF sbatch ...]: prints the job's number.
submit() {
  local run=$1 arguments
  mapfile -t arguments < <(options "$run" "$2")
  shift 2
  sbatch --parsable --nodes=2 --ntasks-per-node=1 --output="$run.log" "$@" launch/slurm.sbatch \
    "${arguments[@]}"
}

field() {
  scontrol --oneliner show job "$1" | grep -o "\b$2=[^ ]*" | head -n 1 | cut -d= -f2
}

is_in_state() {
  [[ $(field "$1" JobState) == "$2" ]]
}

# Waits until job $1 has requeued itself $2 times. Slurm lets it wait two minutes then; here it starts
# in the next second but one (in the same one, nodes take it for the job that they have just ended).
expect_requeued() {
  until_true 60 "job $1 requeues itself" has_restarts "$1" "$2"
  until_true 60 "job $1 is pending" is_in_state "$1" PENDING
  scontrol update "jobid=$1" starttime=now+2
}

has_restarts() {
  (($(field "$1" Restarts) >= $2))
}

expect_end() {
  local job=$1 state=$2 limit=$3
  until_true "$limit" "job $job is $state" is_in_state "$job" "$state"
}

# What the steps of a run have that no clock decides, a line each; that it was stopped is an event.
curve() {
  python3 - "$1/metrics.jsonl" <<'PYTHON'
import json, sys
for line in open(sys.argv[1]):
    step = json.loads(line)
    if "event" in step:
        continue
    for key in ("seconds", "tokens_per_second", "mfu", "memory_bytes"):
        step.pop(key, None)
    print(json.dumps(step))
PYTHON
}

expect_same_curve() {
  curve "$directory/unbroken" >"$directory/wanted"
  curve "$1" >"$directory/got"
  has_steps "$directory/unbroken" "$steps" || fail "the unbroken run has no $steps steps"
  diff "$directory/wanted" "$directory/got" ||
    fail "the losses of $1 are not those of the unbroken run"
}

expect_text() {
  grep -q "$2" "$1" || fail "no '$2' in $(basename "$1")"
}

prepare() {
  launch/setup.sh >"$directory/setup.log"
  cmake --preset cpu >"$directory/build.log"
  cmake --build --preset cpu --target bifocal_cli >>"$directory/build.log"
}

# A job with launcher $1 is stopped twice and has the unbroken run's curve in the end.
check_signals() {
  local run=$directory/$1 job at
  job=$(BIFOCAL_LAUNCHER=$1 submit "$run" "$steps")
  until_true 90 "the run has begun" has_steps "$run" 3
  scancel --batch --signal=USR1 "$job"
  expect_requeued "$job" 1
  at=$(steps_of "$run")
  say "stopped by a signal to the batch script at step $at"
  until_true 60 "the run goes on" has_steps "$run" $((at + 5))
  # mpirun's ranks are no tasks of Slurm's.
  if [[ $1 == srun ]]; then
    scancel --signal=USR1 "$job"
  else
    pkill -USR1 -x -f "$(ranks_of "$run")"
  fi
  expect_requeued "$job" 2
  at=$(steps_of "$run")
  say "stopped by a signal to the ranks at step $at"
  ((at < steps)) || fail "the run was over before it was stopped for the second time"
  expect_end "$job" COMPLETED 120
  (($(grep -c "2 ranks on a,b by $1, start [123]$" "$run.log") == 3)) || fail "wanted three starts"
  expect_same_curve "$run"
  say "all $steps steps are those of the unbroken run"
}

if [[ $BIFOCAL == "$root/build/cpu/bifocal" ]]; then
  prepare
fi
"$BIFOCAL" synth register-machine --count 400 --max-steps 20 --seed 1 \
  --output "$directory/problems.jsonl" >"$directory/synth.log"
"$BIFOCAL" tokenize "$directory/problems.jsonl" \
  --tokenizer data/register-machine/teacher/tokenizer.json --output "$directory/data" \
  >"$directory/tokenize.log" 2>&1
start_slurm

# Slurm looks at limits every half minute: the warning comes in the first half of the only minute.
say "a job with a limit of one minute, and beside it $steps steps without Slurm"
limited=$directory/limited
limited_job=$(submit "$limited" 100000 --time=1 --signal=B:USR1@59)
mapfile -t arguments < <(options "$directory/unbroken" "$steps")
launch/local.sh 2 train "${arguments[@]}" >"$directory/unbroken.log" 2>&1
expect_requeued "$limited_job" 1
expect_text "$limited.log" "time is nearly up"
at=$(steps_of "$limited")
say "stopped by its limit at step $at; then cancelled, it saves and stays away"
scontrol update "jobid=$limited_job" timelimit=60
until_true 60 "the run goes on" has_steps "$limited" $((at + 3))
scancel "$limited_job"
expect_end "$limited_job" CANCELLED 60
until_true 60 "the nodes are free" nodes_are_idle
expect_text "$limited.log" "Slurm ends this job"
at=$(steps_of "$limited")
[[ -f $limited/checkpoints/step_$at/manifest.json ]] || fail "no checkpoint of its last step, $at"
is_in_state "$limited_job" CANCELLED || fail "the cancelled job came back"

for launcher in srun mpirun; do
  say "a job under $launcher"
  check_signals "$launcher"
done

say "the recipe as jobs"
launch/reproduce.sh --tiny --slurm --student bifocal --out "$directory/recipe" >"$directory/recipe.log"
job=$(sed -n 's/.* job \([0-9]*\): compare.*/\1/p' "$directory/recipe.log")
expect_end "$job" COMPLETED 180
[[ -s $directory/recipe/compare.svg ]] || fail "the recipe compared nothing"
[[ $(steps_of "$directory/recipe/bifocal") == 20 ]] || fail "the recipe's student has not 20 steps"

say "a job whose second rank is killed"
run=$directory/killed
job=$(submit "$run" 100000)
until_true 90 "the run has begun" has_steps "$run" 3
pkill -KILL -n -x -f "$(ranks_of "$run")"
killed=$SECONDS
expect_end "$job" FAILED 60
until_true 60 "the nodes are free" nodes_are_idle
say "failed, and nobody left, after $((SECONDS - killed)) s"
say "passed"
