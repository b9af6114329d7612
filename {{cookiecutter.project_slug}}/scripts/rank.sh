#!/usr/bin/env bash
# Be one rank: srun --ntasks=4 --gpus-per-node=4 scripts/rank.sh train, or mpirun -np 4 scripts/rank.sh train
# Their variables become torchrun's. On several machines, MPI requires HEAD, the host of rank 0, and PORT (29400) there.
#:: include "launcher/shared/project.sh" ::#
if [[ -n "${OMPI_COMM_WORLD_RANK:-}" ]]; then # Open MPI
    export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE" LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK"
elif [[ -n "${MPI_LOCALRANKID:-}" ]]; then # MPICH, Intel MPI
    export RANK="$PMI_RANK" WORLD_SIZE="$PMI_SIZE" LOCAL_RANK="$MPI_LOCALRANKID"
else
    export RANK="${SLURM_PROCID:?use srun or mpirun}" WORLD_SIZE="$SLURM_STEP_NUM_TASKS" LOCAL_RANK="$SLURM_LOCALID"
    read -r HEAD <<<"${HEAD:-$(scontrol show hostnames "$SLURM_STEP_NODELIST")}"
    seen="${CUDA_VISIBLE_DEVICES:-}" # With --gpus-per-task, only its own.
    [[ -z "$seen" || "$(wc -w <<<"${seen//,/ }")" -ge "${SLURM_GPUS_ON_NODE:-0}" ]] || LOCAL_RANK=0
fi
[[ -n "${HEAD:-}" || "$RANK" == "$LOCAL_RANK" ]] || mistake "give HEAD, the host of rank 0"
[[ -n "${HEAD:-}" && -z "${SLURM_PROCID:-}" ]] || PORT="${PORT:-$((20000 + ${SLURM_JOB_ID:-$PPID} % 12000))}"
export MASTER_ADDR="${HEAD:-127.0.0.1}" MASTER_PORT="${PORT:-29400}"
[[ -z "${HEAD:-}" || "${SLURM_STEP_NUM_NODES:-2}" == 1 || " $* " == *" doctor "* ]] || check_host_name
ulimit -Sn hard || true # N ranks open N files each, and more.
export PYTHONHASHSEED=0 OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
exec "$python" -m {{ cookiecutter.__package }} "$@"
