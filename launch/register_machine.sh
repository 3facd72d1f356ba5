#!/usr/bin/env bash
# Lets the teacher and the students of data/register-machine answer problems of 1 to 44 steps, one
# answer at temperature 0 and 16 at temperature 0.6, and compares them by the length of the answers.
#   launch/register_machine.sh [OPTION VALUE ...]
#     --greedy N       problems of each step count at temperature 0        (default 20)
#     --sampled N      problems of each step count at temperature 0.6      (default 2)
#     --samples N      answers to each of these                            (default 16)
#     --steps "N .."   step counts                                         (default 1 to 44)
#     --ranks N        ranks that share the problems                       (default: one per core)
#     --output DIR     problems, answers and grades; a run that was killed goes on here
#                                                          (default runs/register-machine)
#     --results DIR    register-machine.json, .md, .svg and -sampled.svg   (default: --output)
# BIFOCAL names another binary than build/cpu/bifocal.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
command=launch/register_machine.sh
if (($# > 0)); then
  command+=$(printf ' %q' "$@")
fi
greedy=20 sampled=2 samples=16 ranks=$(nproc) output=runs/register-machine results=
mapfile -t steps < <(seq 1 44)
while (($# > 0)); do
  if (($# < 2)); then
    echo "[register_machine] $1 wants a value" >&2
    exit 2
  fi
  case "$1" in
    --greedy) greedy=$2 ;;
    --sampled) sampled=$2 ;;
    --samples) samples=$2 ;;
    --steps) read -ra steps <<<"$2" ;;
    --ranks) ranks=$2 ;;
    --output) output=$2 ;;
    --results) results=$2 ;;
    *)
      echo "[register_machine] unknown option $1: see the top of this file" >&2
      exit 2
      ;;
  esac
  shift 2
done
results=${results:-$output}
bifocal=${BIFOCAL:-build/cpu/bifocal}
machine=data/register-machine
models=(swa_learned_sink bifocal teacher)
limit=800 # tokens of an answer; 44 steps take 750
# Bins of four steps, which take 17 tokens each; answers of 20 steps and more are long.
lengths=(--bins "70,138,206,274,342,410,478,546,614,682" --long-tokens 340)
mkdir -p "$output" "$results"

# Problems N of each step count with a seed of their own, into a file.
make_problems() {
  local count=$1 seed=$2 file=$3
  : >"$file.new"
  for n in "${steps[@]}"; do
    $bifocal synth register-machine --count "$count" --steps "$n" --seed "$seed" \
      --output "$output/some.jsonl" >/dev/null
    cat "$output/some.jsonl" >>"$file.new"
  done
  rm -f "$output/some.jsonl"
  mv "$file.new" "$file"
}

# Answers of every model to the problems of a kind, and their grades.
answer() {
  local kind=$1
  shift
  for model in "${models[@]}"; do
    printf '\n== %s answers the %s problems\n' "$model" "$kind"
    launch/local.sh "$ranks" rollouts --model "$machine/$model" --problems "$output/$kind.jsonl" \
      --output "$output/$kind-$model" --max-new-tokens "$limit" --batch 32 --seed 1 "$@"
    local name=$model
    [[ $kind == greedy ]] || name=${model}_$kind
    $bifocal grade --problems "$output/$kind.jsonl" --rollouts "$output/$kind-$model" \
      --grader register-machine --group-by steps --name "$name" \
      --output "$output/$kind-$model.graded.jsonl"
  done
}

grades() {
  printf "$output/$1-%s.graded.jsonl\n" "${models[@]}"
}

begin=$SECONDS
make_problems "$greedy" 11 "$output/greedy.jsonl"
make_problems "$sampled" 12 "$output/sampled.jsonl"
answer greedy --samples 1 --temperature 0
answer sampled --samples "$samples" --temperature 0.6
notes="Ranks: $ranks. Drawing and grading took $((SECONDS - begin)) s, less what an earlier run had drawn."

printf '\n== Comparing\n\n'
mapfile -t files < <(grades greedy)
$bifocal compare "${files[@]}" "${lengths[@]}" --title "Register machine, temperature 0" \
  --command "$command" --notes "$notes" --json "$results/register-machine.json" \
  --markdown "$results/register-machine.tables.md" --plot "$results/register-machine.svg"
mapfile -t files < <(grades sampled)
$bifocal compare "${files[@]}" "${lengths[@]}" --title "Register machine, temperature 0.6" \
  --command "$command" --notes "$notes" --json "$results/register-machine.json" \
  --markdown "$results/register-machine.tables.md" --plot "$results/register-machine-sampled.svg" \
  --append
{
  printf '# Register machine: solved problems by answer length\n\n'
  printf 'The figures of [register-machine.json](register-machine.json). The task and the models: '
  printf '[data/README.md](../../data/README.md). A group is a step count; a step takes 17 tokens, '
  printf 'and both students cache the memory of 144 tokens a layer.\n\n'
  printf '![Temperature 0](register-machine.svg)\n\n'
  printf '![Temperature 0.6](register-machine-sampled.svg)\n\n'
  cat "$results/register-machine.tables.md"
} >"$results/register-machine.md"
rm "$results/register-machine.tables.md"
printf '\nDone: %s\n' "$results/register-machine.md, .json, .svg and -sampled.svg"
