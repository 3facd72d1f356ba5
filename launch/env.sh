# Settings of OpenMP and MPI for runs on this machine, each with its reason. Sourced by local.sh
# and slurm.sbatch; values that are set already stay.
# shellcheck shell=bash

# Threads of one of $1 ranks on this machine: the cores shared out evenly. More threads than cores
# make OpenMP's barriers wait for a rank that is not running.
bifocal_threads() {
  local ranks=$1 cores
  cores=$(nproc)
  echo $((cores > ranks ? cores / ranks : 1))
}

# A rank that waits inside MPI yields its core. Open MPI does so by itself only where it knows that
# it was given more ranks than cores; what else runs on the machine, and the ranks' own threads, it
# does not count.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"

# Open MPI refuses root, which is who a container runs as, unless told twice.
if ((EUID == 0)); then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
