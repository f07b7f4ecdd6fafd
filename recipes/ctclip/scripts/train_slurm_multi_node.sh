#!/usr/bin/env bash
#SBATCH --job-name=ctclip
#SBATCH --nodes=2                   # nodes
#SBATCH --ntasks-per-node=1         # one launcher per node, which starts a process per GPU
#SBATCH --gpus-per-node=4           # GPUs per node
#SBATCH --cpus-per-task=32
#SBATCH --partition=gpu
#SBATCH --signal=TERM@120           # time to save before the limit
#SBATCH --output=logs/train_%j.out
#SBATCH --error=logs/train_%j.err
# Train on several machines. From the folder that holds train.py and logs/:
#   sbatch scripts/train_slurm_multi_node.sh
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$PWD}" # sbatch runs a copy of this file from elsewhere

export ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-accelerate_config_multi_node.yaml}
export CONFIG=${CONFIG:-configs/base_config.yaml}
export GPUS_PER_NODE=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-4}}
GPUS_PER_NODE=${GPUS_PER_NODE##*:} # "h100:4" is four
export NUM_PROCESSES=$((SLURM_JOB_NUM_NODES * GPUS_PER_NODE))
read -r MAIN_ADDRESS < <(scontrol show hostnames "$SLURM_JOB_NODELIST") # the first of them
export MAIN_ADDRESS
# A port of this job's own: another job may use 29500 on the same node.
export MAIN_PORT=${MAIN_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 10000))}
python -m lockstep_recipes.ctclip.launch "$ACCELERATE_CONFIG" --num_processes "$NUM_PROCESSES"

# Since SLURM 22.05 srun takes this from its own variable, not from --cpus-per-task of the job.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

# In single quotes: SLURM_PROCID is another on each node, and here it is always 0.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch \
    --config_file "$ACCELERATE_CONFIG" \
    --num_machines "$SLURM_JOB_NUM_NODES" \
    --num_processes "$NUM_PROCESSES" \
    --machine_rank "$SLURM_PROCID" \
    --main_process_ip "$MAIN_ADDRESS" \
    --main_process_port "$MAIN_PORT" \
    train.py --config "$CONFIG"'
