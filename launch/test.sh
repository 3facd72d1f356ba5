#!/usr/bin/env bash
# Builds and runs every test that needs no GPU, from a bare Debian 12 or Ubuntu 24.04 on.
#   launch/test.sh           all of them
#   launch/test.sh --fast    without the slow ones
#   launch/test.sh --no-setup ...    installs nothing: for machines whose packages others manage
#   launch/test.sh --only PART ...   build, cuda (its build) or tests alone
# Where nvcc is found the CUDA kernels and their tests are built too; BIFOCAL_REQUIRE_CUDA=1 makes
# its absence an error. CUDA tests need a GPU and are run by: ctest --preset cuda
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
preset=cpu
setup=1
only=""
while (($# > 0)); do
  case "$1 ${2:-}" in
    "--fast "*) preset=cpu-fast ;;
    "--no-setup "*) setup=0 ;;
    "--only build" | "--only cuda" | "--only tests")
      only=$2
      shift
      ;;
    *)
      echo "[test] unknown argument $*: --fast, --no-setup and --only build, cuda or tests are known" >&2
      exit 2
      ;;
  esac
  shift
done

phase() {
  local name=$1 begin=$SECONDS
  shift
  echo "[test] $name: $*"
  "$@"
  echo "[test] $name took $((SECONDS - begin)) s"
}

build_cpu() {
  phase "configure" cmake --preset cpu
  phase "build" cmake --build --preset cpu
}

build_cuda() {
  if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
    PATH=$PATH:/usr/local/cuda/bin
    phase "configure cuda" cmake --preset cuda
    if ! grep -q '^NCCL_INCLUDE_DIR:PATH=/' build/cuda/CMakeCache.txt; then
      echo "[test] note: no nccl.h on this machine: what uses several GPUs, and its tests nccl_tests" \
        "and nccl_fault, are not compiled; set NCCL_INCLUDE_DIR to its folder (docs/building.md)"
    fi
    phase "build cuda" cmake --build --preset cuda --target cuda_programs
  elif [[ "${BIFOCAL_REQUIRE_CUDA:-0}" == 1 ]]; then
    echo "[test] nvcc was not found, and BIFOCAL_REQUIRE_CUDA=1 wants it: put it on PATH" >&2
    exit 1
  else
    echo "[test] cuda preset skipped: no nvcc on this machine (the CPU tests do not need it)"
  fi
}

if ((setup)); then
  phase "set-up" launch/setup.sh
fi
if [[ -z $only || $only == build ]]; then build_cpu; fi
if [[ -z $only || $only == cuda ]]; then build_cuda; fi
if [[ -z $only || $only == tests ]]; then
  phase "tests" ctest --preset "$preset" -j "$(nproc)"
fi
