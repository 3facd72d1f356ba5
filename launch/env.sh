# Settings of OpenMP, MPI and NCCL for a run, each with its reason. Sourced by local.sh and
# slurm.sbatch; values that are set already stay. BIFOCAL_INTERFACE (eth0, or a list with commas)
# names the network between hosts where the libraries would pick another.
# shellcheck shell=bash

# Threads of one of $1 ranks on this machine: the cores shared out evenly. More threads than cores
# make OpenMP's barriers wait for a rank that is not running. (Slurm gives a rank --cpus-per-task.)
# OMP_PROC_BIND stays unset: the launcher binds a rank to its cores, and where it does not, threads
# that bind themselves would all take the same first cores.
bifocal_threads() {
  local ranks=$1 cores
  cores=$(nproc)
  echo $((cores > ranks ? cores / ranks : 1))
}

# A rank that waits inside MPI yields its core. Open MPI does so by itself only where it knows that
# it was given more ranks than cores; what else runs on the machine, and the ranks' own threads, it
# does not count.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}"

# A host that is cut off: mpirun and its daemons ask each other once a second and give up after 50 lost
# answers, which takes 51 to 53 s. Open MPI's own values take 8 minutes. Not sooner, so that rank 0 can say first which rank it
# was (run.heartbeat_seconds, 50); not later, since ranks end from 54 s on, and a daemon that waits for the
# answer to something it sent, such as the end of a rank, does not ask any more.
export OMPI_MCA_oob_tcp_keepalive_time="${OMPI_MCA_oob_tcp_keepalive_time:-1}"
export OMPI_MCA_oob_tcp_keepalive_intvl="${OMPI_MCA_oob_tcp_keepalive_intvl:-1}"
export OMPI_MCA_oob_tcp_keepalive_probes="${OMPI_MCA_oob_tcp_keepalive_probes:-50}"

# Open MPI refuses root, which is who a container runs as, unless told twice.
if ((EUID == 0)); then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# No sums inside NVLink switches: their order is not fixed, and a run would not repeat its bits.
# (The program sets the same; here it stands for people who look.)
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

# NCCL says why it fails; it is silent while all is well.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Hosts often have networks that do not reach each other (containers, management): Open MPI tries all
# of them and hangs, NCCL takes the first. The ranks' data, Open MPI's own daemons (mpirun), and
# NCCL's sockets, by which it also starts InfiniBand.
if [[ -n ${BIFOCAL_INTERFACE:-} ]]; then
  export OMPI_MCA_btl_tcp_if_include="${OMPI_MCA_btl_tcp_if_include:-$BIFOCAL_INTERFACE}"
  export OMPI_MCA_oob_tcp_if_include="${OMPI_MCA_oob_tcp_if_include:-$BIFOCAL_INTERFACE}"
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$BIFOCAL_INTERFACE}"
fi
