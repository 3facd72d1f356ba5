#!/usr/bin/env bash
# From a bare machine to two trained students in minutes: installs, builds, distils a tiny teacher
# into a bifocal and a window student of equal memory on two ranks, compares them, lets the fully
# trained students that come with the project solve problems, and exports one student.
#   launch/quickstart.sh                installs packages first (launch/setup.sh)
#   launch/quickstart.sh --no-setup     installs nothing
# Everything is written under runs/tiny, anew each time.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
setup=1
for argument in "$@"; do
  case "$argument" in
    --no-setup) setup=0 ;;
    *)
      echo "[quickstart] unknown argument $argument: only --no-setup is known" >&2
      exit 2
      ;;
  esac
done

step() {
  printf '\n== %s\n' "$*"
}

bifocal=build/cpu/bifocal
machine=data/register-machine
out=runs/tiny

if ((setup)); then
  step "Installing packages"
  launch/setup.sh
fi

step "Building bifocal"
cmake --preset cpu
cmake --build --preset cpu --target bifocal_cli

step "Making register-machine problems and packing their tokens"
rm -rf "$out"
mkdir -p "$out"
$bifocal synth register-machine --count 4000 --max-steps 46 --seed 1 --output "$out/problems.jsonl"
$bifocal tokenize "$out/problems.jsonl" --tokenizer "$machine/teacher/tokenizer.json" \
  --held-out 0.05 --output "$out/data"

for student in bifocal swa_learned_sink; do
  step "Distilling the teacher into $student on two ranks (align, then distill)"
  launch/local.sh 2 train --config "configs/tiny/$student.toml"
done

for student in bifocal swa_learned_sink; do
  step "KL of $student to its teacher, by position"
  launch/local.sh 2 evaluate --config "configs/tiny/$student.toml" --student "$out/$student" \
    --json "$out/$student/evaluation.json"
done

step "Short (8 steps) and long (32 steps) problems: the teacher and the students that come with the project"
for steps in 8 32; do
  $bifocal synth register-machine --count 40 --steps "$steps" --seed 2 \
    --output "$out/problems-$steps.jsonl"
done
printf '\n%-18s %16s %16s\n' "solved" "8 steps" "32 steps" >"$out/solved.txt"
for model in teacher bifocal swa_learned_sink; do
  rates=()
  for steps in 8 32; do
    launch/local.sh 1 generate --model "$machine/$model" --input "$out/problems-$steps.jsonl" \
      --batch 40 --max-new-tokens 700 --output "$out/answers-$model-$steps.jsonl"
    rates+=("$($bifocal synth check --problems "$out/problems-$steps.jsonl" \
      --answers "$out/answers-$model-$steps.jsonl" --failures 0 | awk -v n="$steps" '$1 == n {print $4 " of " $2}')")
  done
  printf '%-18s %16s %16s\n' "$model" "${rates[@]}" >>"$out/solved.txt"
done
cat "$out/solved.txt"

step "Exporting the bifocal student just trained in Hugging Face form"
$bifocal export "$out/bifocal" --output "$out/export"
ls -l "$out/export"

cat <<TEXT

Done. Look at:
  $out/*/metrics.jsonl and evaluation.json   losses, and KL by position
  $out/export                                the exported student
  README.md                                  what to do next
TEXT
