#!/usr/bin/env bash
# Installs what the build and its tests need on Debian 12 and Ubuntu 24.04. Packages that are
# there already are left alone; when all are, nothing is asked of the network or of root.
#   launch/setup.sh          compiler, libraries, MPI
#   launch/setup.sh --dev    also what .ci/run checks with
# CUDA is never installed: the cuda preset uses what the machine has.
set -euo pipefail

packages=(
  g++ cmake ninja-build git ca-certificates pkg-config ccache zstd
  libopenmpi-dev openmpi-bin libhdf5-dev hdf5-tools
  libcli11-dev libtomlplusplus-dev nlohmann-json3-dev libfmt-dev libgtest-dev libssl-dev
  libpcre2-dev libutf8proc-dev libzstd-dev zlib1g-dev
)
# Names of the same version everywhere: other releases of clang-format lay code out differently,
# and clang-tidy before 16 cannot read gcc's <source_location> (nor gcc's omp.h: libomp has one).
# clang and its runtime build tests/fuzz; python3-venv is for tests/interop, slurm-wlm and munge for
# tests/slurm, iproute2 for tests/netns.
dev_packages=(
  clang-format-14 clang-tidy-16 libomp-16-dev clang-16 libclang-rt-16-dev
  python3 python3-venv python3-h5py python3-numpy shellcheck slurm-wlm munge
  iproute2
)

case "${1:-}" in
  "") ;;
  --dev) packages+=("${dev_packages[@]}") ;;
  *)
    echo "[setup] unknown argument $1: only --dev is known" >&2
    exit 2
    ;;
esac

is_installed() {
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

if ! command -v dpkg-query >/dev/null; then
  echo "[setup] this script knows Debian 12 and Ubuntu 24.04 only: install the packages named in" \
    "docs/building.md by hand, then call cmake as described there" >&2
  exit 1
fi

# Either threading of OpenBLAS will do; the OpenMP one shares its threads with ours.
if ! is_installed libopenblas-openmp-dev && ! is_installed libopenblas-pthread-dev; then
  packages+=(libopenblas-openmp-dev)
fi

missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done

if ((${#missing[@]} == 0)); then
  echo "[setup] all ${#packages[@]} packages are installed"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "[setup] needs root to install ${missing[*]}: run as root, or have them installed" >&2
    exit 1
  fi
  as_root=(sudo)
fi

echo "[setup] installing ${#missing[@]} of ${#packages[@]} packages: ${missing[*]}"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3 update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o Acquire::Retries=3 \
  -o Dpkg::Use-Pty=0 install --no-install-recommends "${missing[@]}"
echo "[setup] done"
