#!/usr/bin/env bash
# The method's whole recipe as jobs: tokenize a corpus, align and distil the four students of Qwen3-4B,
# export them, let them and the teacher answer problems, grade, and compare by the length of answers.
#   launch/reproduce.sh --print ...    shows every job, what it waits for, and its command
#   launch/reproduce.sh --slurm ...    submits them, each after those that it waits for
#   launch/reproduce.sh --run ...      runs them here one after the other; a second time, what a first one
#                                      has finished is left as it is
#   launch/reproduce.sh --tiny         runs them here at tiny size on two CPU ranks, in minutes: the teacher
#                                      of data/register-machine, problems made on the spot. It proves the
#                                      chain, not the method; with --print or --slurm it does these
# Full size wants (for --tiny they are made):
#   --corpus DIR      chat, code, math, science and safety.jsonl.zst, as data/README.md says
#   --problems FILE   JSON lines with id, prompt or messages, answer (docs/evaluation.md)
# and takes
#   --machine NAME    a file of configs/machines, 1xh200, 8x80gb (default) or 64x80gb
#   --teacher DIR     default models/Qwen3-4B-Instruct-2507
#   --student NAME    one student instead of all four; may be repeated
#   --grader NAME     default exact
#   --out DIR         default runs/qwen3-4b, or runs/reproduce-tiny
#   --sbatch OPTION   for every job's sbatch, such as --sbatch --account=me; may be repeated
# BIFOCAL names another binary than build/cuda/bifocal (with --tiny: build/cpu/bifocal). How long the jobs
# take: bifocal plan --gpu h100 --config configs/qwen3-4b/NAME.toml --config configs/machines/8x80gb.toml
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
mode="" tiny=0 corpus="" problems="" machine=8x80gb teacher="" grader=exact out=""
students=() sbatch_options=()
while (($# > 0)); do
  case "$1" in
    --print | --slurm | --run)
      mode=${1#--}
      shift
      continue
      ;;
    --tiny)
      tiny=1
      shift
      continue
      ;;
  esac
  if (($# < 2)); then
    echo "[reproduce] unknown argument or no value: $1; see the head of this script" >&2
    exit 2
  fi
  case "$1" in
    --corpus) corpus=$2 ;;
    --problems) problems=$2 ;;
    --machine) machine=$2 ;;
    --teacher) teacher=$2 ;;
    --student) students+=("$2") ;;
    --grader) grader=$2 ;;
    --out) out=$2 ;;
    --sbatch) sbatch_options+=("$2") ;;
    *)
      echo "[reproduce] unknown argument $1: see the head of this script" >&2
      exit 2
      ;;
  esac
  shift 2
done
if ((tiny)); then
  mode=${mode:-run}
fi
if [[ -z $mode ]]; then
  echo "[reproduce] wanted --print, --slurm, --run or --tiny: see the head of this script" >&2
  exit 2
fi
if ((${#students[@]} == 0)); then
  students=(swa_learned_sink swa_sink_tokens bifocal bifocal_query)
fi

# Nodes and tasks of a node on a machine of configs/machines.
declare -A nodes=([1xh200]=1 [8x80gb]=1 [64x80gb]=8) tasks=([1xh200]=1 [8x80gb]=8 [64x80gb]=8)
declare -A weights=([chat]=40 [code]=20 [math]=20 [science]=15 [safety]=5)
categories=(chat code math science safety)
if ((tiny)); then
  if [[ -n $corpus$problems$teacher ]]; then
    echo "[reproduce] --tiny makes its own corpus and problems and has its own teacher: leave --corpus," \
      "--problems and --teacher out" >&2
    exit 2
  fi
  out=${out:-runs/reproduce-tiny}
  corpus=$out/corpus problems=$out/problems.jsonl grader=register-machine
  teacher=data/register-machine/teacher configs=configs/tiny
  binary=${BIFOCAL:-build/cpu/bifocal}
  resources=(--nodes=2 --ntasks-per-node=1)
  ranks=2
  machine_config=()
  changes=(--data.row_tokens 256 --align.steps 8 --checkpoint.every 10)
  distill_changes=(--distill.steps 12)
  answers=(--samples 2 --temperature 0.6 --max-new-tokens 100 --batch 16)
  lengths=(--bins "20,40,60" --long-tokens 40)
else
  if [[ -z ${nodes[$machine]:-} ]]; then
    echo "[reproduce] --machine is $machine, wanted one of ${!nodes[*]}" >&2
    exit 2
  fi
  if [[ -z $corpus || -z $problems ]]; then
    echo "[reproduce] wanted --corpus and --problems: see the head of this script" >&2
    exit 2
  fi
  out=${out:-runs/qwen3-4b}
  teacher=${teacher:-models/Qwen3-4B-Instruct-2507} configs=configs/qwen3-4b
  binary=${BIFOCAL:-build/cuda/bifocal}
  ranks=$((nodes[$machine] * tasks[$machine]))
  resources=(--nodes="${nodes[$machine]}" --ntasks-per-node="${tasks[$machine]}"
    --gpus-per-node="${tasks[$machine]}" --cpus-per-task=8)
  machine_config=(--config "configs/machines/$machine.toml")
  changes=() distill_changes=()
  answers=(--run.device cuda --samples 16 --temperature 0.6 --top-p 0.95 --top-k 20
    --max-new-tokens 31744)
  lengths=()
fi
export BIFOCAL=$binary

# Numbers of the jobs in Slurm, by name.
declare -A numbers=()

# job KIND NAME "AFTER ..." COMMAND [ARGUMENT ...]: a command of the program, on all ranks (KIND ranks) or
# on one (KIND one), when the jobs AFTER have succeeded.
job() {
  local kind=$1 name=$2 after=$3 command=$4
  shift 4
  case $mode in
    print)
      printf '\n# %s: %s%s\n' "$name" "$([[ $kind == one ]] && echo one rank || echo "$ranks ranks")" \
        "${after:+, after $after}"
      printf '%q ' "$binary" "$command" "$@"
      echo
      ;;
    run) run_job "$kind" "$name" "$command" "$@" ;;
    slurm) submit_job "$kind" "$name" "$after" "$command" "$@" ;;
  esac
}

run_job() {
  local kind=$1 name=$2 command=$3 begin=$SECONDS line
  shift 3
  line=$(printf '%q ' "$binary" "$command" "$@")
  if [[ -f $out/done/$name && $(<"$out/done/$name") == "$line" ]]; then
    echo "[reproduce] $name is done"
    return
  fi
  echo "[reproduce] $name"
  if [[ $kind == one ]]; then
    "$binary" "$command" "$@" >"$out/logs/$name.log" 2>&1 || fail_job "$name"
  else
    launch/local.sh "$ranks" "$command" "$@" >"$out/logs/$name.log" 2>&1 || fail_job "$name"
  fi
  printf '%s\n' "$line" >"$out/done/$name"
  echo "[reproduce] $name took $((SECONDS - begin)) s"
}

fail_job() {
  tail -n 20 "$out/logs/$1.log" >&2
  echo "[reproduce] $1 failed: all of its lines are in $out/logs/$1.log; the same command goes on with it" >&2
  exit 1
}

submit_job() {
  local kind=$1 name=$2 after=$3 command=$4 dependency="" one script
  shift 4
  for one in $after; do
    dependency+=:${numbers[$one]}
  done
  local options=(--parsable --job-name="$name" --output="$out/logs/$name-%j.log" --requeue
    --kill-on-invalid-dep=yes "${sbatch_options[@]}")
  [[ -z $dependency ]] || options+=(--dependency="afterok$dependency")
  if [[ $kind == one ]]; then
    printf -v script '%q ' "$binary" "$command" "$@"
    numbers[$name]=$(sbatch "${options[@]}" --ntasks=1 --wrap="$script")
  else
    numbers[$name]=$(BIFOCAL_COMMAND=$command sbatch "${options[@]}" "${resources[@]}" \
      launch/slurm.sbatch "$@")
  fi
  echo "[reproduce] job ${numbers[$name]}: $name${after:+, after $after}"
}

# A corpus and problems that the tiny teacher knows.
make_tiny_corpus() {
  local category seed=1
  mkdir -p "$corpus"
  for category in "${categories[@]}"; do
    "$binary" synth register-machine --count 60 --max-steps 12 --seed $((seed++)) \
      --output "$corpus/$category.jsonl" >/dev/null
  done
  "$binary" synth register-machine --count 6 --max-steps 4 --seed 99 --output "$problems" >/dev/null
}

# The recipe's shares of the tokens.
write_mixture() {
  local category
  for category in "${categories[@]}"; do
    printf '[[source]]\nname = "%s"\npaths = ["data/%s"]\nweight = %d\n\n' "$category" "$category" \
      "${weights[$category]}"
  done >"$out/mixture.toml"
}

if [[ $mode != print ]]; then
  if [[ ! -x $binary ]]; then
    echo "[reproduce] no program at $binary: build it first, or name another in BIFOCAL" >&2
    exit 1
  fi
  mkdir -p "$out/logs" "$out/done"
  if ((tiny)); then make_tiny_corpus; fi
  write_mixture
fi

shards=()
for category in "${categories[@]}"; do
  file=$corpus/$category.jsonl
  ((tiny)) || file+=.zst
  job one "tokenize-$category" "" tokenize "$file" --tokenizer "$teacher/tokenizer.json" \
    --held-out 0.02 --output "$out/data/$category"
  shards+=("tokenize-$category")
done

# Draws a model's answers and grades them.
answer() {
  local name=$1 model=$2 after=$3
  job ranks "rollouts-$name" "$after" rollouts --model "$model" --problems "$problems" \
    --output "$out/answers/$name" --seed 1 "${answers[@]}"
  job one "grade-$name" "rollouts-$name" grade --problems "$problems" \
    --rollouts "$out/answers/$name" --grader "$grader" --name "$name" \
    --output "$out/answers/$name.jsonl"
  graded+=("$out/answers/$name.jsonl")
  grades+=("grade-$name")
}

graded=() grades=()
for student in "${students[@]}"; do
  options=(--config "$configs/$student.toml" "${machine_config[@]}" --run.directory "$out/$student"
    --teacher.path "$teacher" --data.train "" --data.mixture "$out/mixture.toml" "${changes[@]}")
  before="${shards[*]}"
  # Sink tokens have nothing to align.
  if [[ $student != swa_sink_tokens ]]; then
    job ranks "align-$student" "$before" train "${options[@]}" \
      "${distill_changes[@]}" --until align
    before=align-$student
  fi
  job ranks "distill-$student" "$before" train "${options[@]}" "${distill_changes[@]}"
  job one "export-$student" "distill-$student" export "$out/$student" --output "$out/export/$student"
  answer "$student" "$out/export/$student" "export-$student"
done
answer teacher "$teacher" ""
job one compare "${grades[*]}" compare "${graded[@]}" "${lengths[@]}" --title "Students and teacher" \
  --json "$out/compare.json" --markdown "$out/compare.md" --plot "$out/compare.svg"
if [[ $mode == run ]]; then
  echo "[reproduce] all done after $SECONDS s: $out/compare.md, .json and .svg"
fi
