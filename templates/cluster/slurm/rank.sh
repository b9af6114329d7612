#!/usr/bin/env bash
# Be one rank of a program that starts the ranks itself:
#   srun --ntasks=4 --gpus-per-node=4 scripts/rank.sh train
#   mpirun -np 4 scripts/rank.sh train
# With MPI on several machines, HEAD is the host of rank 0, and PORT (29400) is free there.
#:: include "launcher/shared/project.sh" ::#

read_open_mpi() {
    RANK="$OMPI_COMM_WORLD_RANK"
    WORLD_SIZE="$OMPI_COMM_WORLD_SIZE"
    LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK"
}

read_mpich() {
    RANK="$PMI_RANK"
    WORLD_SIZE="$PMI_SIZE"
    LOCAL_RANK="$MPI_LOCALRANKID"
}

read_slurm() {
    RANK="$SLURM_PROCID"
    WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
    LOCAL_RANK="$SLURM_LOCALID"
    if [[ -z "${HEAD:-}" ]]; then
        # Rank 0 runs on the first host of the list.
        read -r HEAD <<<"$(scontrol show hostnames "$SLURM_STEP_NODELIST")"
    fi
    # A rank sees only its own GPU with --gpus-per-task, as number 0.
    local visible="${CUDA_VISIBLE_DEVICES:-}"
    if [[ -n "$visible" ]]; then
        local count
        count="$(wc -w <<<"${visible//,/ }")"
        if [[ "$count" -lt "${SLURM_GPUS_ON_NODE:-0}" ]]; then
            LOCAL_RANK=0
        fi
    fi
}

# The ranks of a job have to agree on a port, which another job on the machine does not use.
choose_port() {
    if [[ -n "${HEAD:-}" && -z "${SLURM_PROCID:-}" ]]; then
        # Nothing that all machines know distinguishes the jobs of MPI.
        echo 29400
    else
        # On one machine, all ranks have the same parent, mpirun.
        echo $((20000 + ${SLURM_JOB_ID:-$PPID} % 12000))
    fi
}

if [[ -n "${OMPI_COMM_WORLD_RANK:-}" ]]; then
    read_open_mpi
elif [[ -n "${MPI_LOCALRANKID:-}" ]]; then
    # MPICH and Intel MPI set the same variables.
    read_mpich
elif [[ -n "${SLURM_PROCID:-}" ]]; then
    read_slurm
else
    mistake "this script starts one rank: call it by srun or mpirun, or call scripts/launch.sh"
fi
if [[ -z "${HEAD:-}" && "$RANK" != "$LOCAL_RANK" ]]; then
    mistake "give HEAD, the host of rank 0"
fi
# The subcommand doctor reports the host name together with everything else.
if [[ -n "${HEAD:-}" && "${SLURM_STEP_NUM_NODES:-2}" != 1 && " $* " != *" doctor "* ]]; then
    check_host_name
fi
# PyTorch reads these variables, as set by any launcher.
export RANK WORLD_SIZE LOCAL_RANK
export MASTER_ADDR="${HEAD:-127.0.0.1}"
export MASTER_PORT="${PORT:-$(choose_port)}"

# Every rank opens a connection to each other rank, and files.
ulimit -Sn hard || true
# Ranks would otherwise see the elements of a set in different orders.
export PYTHONHASHSEED=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
exec "$python" -m {{ cookiecutter.__package }} "$@"
