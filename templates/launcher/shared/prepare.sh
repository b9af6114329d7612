#:: include "launcher/shared/project.sh" ::#

# These commands start no ranks.
case " $* " in
    *" --help "* | *" -h "* | *" --print_config"* | " export "* | " plot "* | " rehearse "* | " estimate "*)
        exec "$python" -m {{ cookiecutter.__package }} "$@"
        ;;
esac

#:: if not fact("nproc") ::#
# Print the number of GPUs that this process sees.
count_gpus() {
    local devices
    # CUDA_VISIBLE_DEVICES may hide GPUs. Each GPU has a device file; compgen fails without any.
    devices="${CUDA_VISIBLE_DEVICES-$(compgen -G '/dev/nvidia[0-9]*' || true)}"
    # CUDA ignores everything from the first -1 or NoDevFiles on.
    devices=",$devices"
    devices="${devices%%,[-N]*}"
    wc -w <<<"${devices//,/ }"
}

#:: endif ::#
number='[1-9][0-9]{0,4}'

check_several_machines() {
    local last=$((nodes - 1))
    if [[ -z "${HEAD:-}" || ! "${NODE_RANK:-}" =~ ^(0|$number)$ || "$NODE_RANK" -gt "$last" ]]; then
        mistake "NODES=$nodes requires HEAD, the first machine, and NODE_RANK from 0 to $last"
    fi
    # The subcommand doctor reports the host name together with everything else.
    if [[ " $* " != *" doctor "* ]]; then
        check_host_name
    fi
}

#:: if fact("nproc") ::#
nproc="${NPROC:-{{ fact("nproc") }}}"
#:: else ::#
# By default, there is one rank per {{ fact("accelerators") or "accelerator" }}, or two on a CPU.
gpus="$(count_gpus)"
nproc="${NPROC:-{{ fact("ranks") or "$((gpus ? gpus : 2))" }}}"
#:: endif ::#
nodes="${NODES:-1}"
if [[ ! "$nproc" =~ ^$number$ || ! "$nodes" =~ ^$number$ ]]; then
    mistake "NPROC=$nproc and NODES=$nodes have to be numbers"
fi
if [[ "$nodes" != 1 ]]; then
    check_several_machines "$@"
fi
# A mistake in the settings is reported here once, instead of by every rank.
WORLD_SIZE=$((nodes * nproc)) "$python" -m {{ cookiecutter.__package }} --preflight "$@"

# Every rank opens a connection to each other rank, and files.
ulimit -Sn hard || true
# More threads per rank are slower for small models on CPUs.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# glibc keeps freed memory, because new pages would take up to a tenth of a step.
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-268435456}"
# Ranks end if the launcher is gone. It takes the place of this shell, and keeps its number.
export LAUNCHER_PID=$$
