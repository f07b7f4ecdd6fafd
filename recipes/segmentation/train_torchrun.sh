#!/usr/bin/env bash
# Train on two GPUs with torchrun: bash train_torchrun.sh [further flags of train.py]
set -euo pipefail
cd "$(dirname "$0")"

NUM_GPUS=${NUM_GPUS:-2}
BATCHSIZE=${BATCHSIZE:-8} # per GPU
exec torchrun --nproc_per_node="$NUM_GPUS" --standalone train.py --distributed \
    --layers 50 --model_type res50_ASPP_lorm --batchsize "$BATCHSIZE" "$@"
