#!/bin/bash
# A run on SLURM: a Ray node on each host of the job, and the driver on the first.
#
#     sbatch launchers/slurm.sh recipes/moe_30b_a3b/gspo.yaml [key=value ...]
#
# Submit it in a folder that all hosts mount, with the config's num_gpus_per_node. docs/launching.md describes it.
#SBATCH --job-name=roll
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=roll-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@600
set -euo pipefail

config=${1:?usage: sbatch launchers/slurm.sh CONFIG [key=value ...]}
shift
environment=${ROLL_ENV:-$HOME/roll-env} # a virtual environment that all hosts mount
port=${ROLL_RAY_PORT:-6379}
# shellcheck source=/dev/null
source "$environment/bin/activate"

# The first address of a host. Choose another where hosts have several networks: docs/multi-node.md.
print_address='hostname --all-ip-addresses | cut -d" " -f1'
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
head_address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" bash -c "$print_address")
export RAY_ADDRESS="$head_address:$port"

# These Ray nodes are steps of the job. SLURM sends TERM only to this script (B:), so that they survive it.
start="ray start --block --disable-usage-stats --node-ip-address=\$($print_address)"
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
  bash -c "$start --head --port=$port --include-dashboard=false" &
if [ "${#hosts[@]}" -gt 1 ]; then
  others=$((${#hosts[@]} - 1))
  srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" bash -c "$start --address=$RAY_ADDRESS" &
fi
# shellcheck disable=SC2046 # one word for each process
trap 'kill $(jobs -p) 2> /dev/null' EXIT

timeout 600 python - "${#hosts[@]}" << 'WAIT'
import sys
import time

import ray

expected, joined = int(sys.argv[1]), 0
while joined < expected:
    time.sleep(2)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR")
        joined = sum(node["Alive"] for node in ray.nodes())
    except ConnectionError:
        pass
    finally:
        ray.shutdown()
WAIT

# 600 s before the time limit, and at a preemption, SLURM sends TERM. The run saves its step and exits with 75.
roll-core run "$config" resume_from_checkpoint=auto preemption_timeout=480 "$@" &
driver=$!
trap 'kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
if [ "$code" -gt 128 ]; then # TERM ended `wait`, not the run
  code=0
  wait "$driver" || code=$?
fi
if [ "$code" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID" # it resumes
fi
exit "$code"
