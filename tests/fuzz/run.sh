#!/usr/bin/env bash
# Builds one fuzzer with clang and runs it from the committed inputs on.
#   tests/fuzz/run.sh TARGET SECONDS [options of libFuzzer]
# TARGET is line_reader, json_lines, tokenizer_json, safetensors, toml or hdf5. What it learns goes to
# build/cpu-fuzz/corpus/TARGET, an input that fails to build/cpu-fuzz/TARGET-*.
set -euo pipefail

cd "$(dirname "$0")/../.."
if (($# < 2)) || [[ ! -f "tests/fuzz/$1_fuzz.cpp" ]] || [[ ! "$2" =~ ^[0-9]+$ ]]; then
  echo "usage: tests/fuzz/run.sh TARGET SECONDS [options of libFuzzer]" >&2
  echo "targets:" tests/fuzz/*_fuzz.cpp >&2
  exit 2
fi
target=$1
seconds=$2
shift 2

cmake --preset cpu-fuzz >/dev/null
ninja -C build/cpu-fuzz "${target}_fuzz"
mkdir -p "build/cpu-fuzz/corpus/$target"
# One thread: libFuzzer forks no workers here, and BLAS is not what is tested.
export OMP_NUM_THREADS=1
exec "build/cpu-fuzz/tests/fuzz/${target}_fuzz" \
  -max_total_time="$seconds" -timeout=20 -rss_limit_mb=1024 -print_final_stats=1 \
  -artifact_prefix="build/cpu-fuzz/$target-" "$@" \
  "build/cpu-fuzz/corpus/$target" "tests/fuzz/corpus/$target"
