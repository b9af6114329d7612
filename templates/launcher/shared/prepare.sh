#:: include "launcher/shared/project.sh" ::#
case " $* " in
    *" --help "* | *" -h "* | *" --print_config"* | " export "* | " plot "* | " estimate "*)
        exec "$python" -m {{ cookiecutter.__package }} "$@" ;;
esac
gpus="${CUDA_VISIBLE_DEVICES-$(compgen -G '/dev/nvidia[0-9]*' || true)}"
gpus=",$gpus" gpus="${gpus%%,[-N]*}" # CUDA sees nothing from -1 or NoDevFiles on.
gpus=$(wc -w <<<"${gpus//,/ }")
nproc="${NPROC:-{{ fact("nproc") or fact("ranks") or "$((gpus ? gpus : 2))" }}}" nodes="${NODES:-1}" number='[1-9][0-9]{0,4}'
[[ "$nproc $nodes" =~ ^$number\ $number$ ]] || mistake "NPROC=$nproc and NODES=$nodes have to be numbers"
[[ $nodes == 1 || (-n "${HEAD:-}" && "${NODE_RANK:-}" =~ ^(0|$number)$ && $NODE_RANK -lt $nodes) ]] ||
    mistake "NODES=$nodes requires HEAD, the first machine, and NODE_RANK from 0 to $((nodes - 1))"
[[ $nodes == 1 || " $* " == *" doctor "* ]] || check_host_name
# Reports a mistake once, in one line, before any rank starts.
WORLD_SIZE=$((nodes * nproc)) "$python" -m {{ cookiecutter.__package }} --preflight "$@"

ulimit -Sn hard || true # N ranks open N files each, and more.
# One thread for each rank: for small models on CPUs, more are slower. glibc keeps freed memory: new pages would take
# up to a tenth of a step.
export LAUNCHER_PID=$$ OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-268435456}"
