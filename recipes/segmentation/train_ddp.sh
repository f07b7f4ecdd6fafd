#!/usr/bin/env bash
# Train on two GPUs with torch.distributed.launch: bash train_ddp.sh [further flags of train.py]
set -euo pipefail
cd "$(dirname "$0")"

NUM_GPUS=${NUM_GPUS:-2}
BATCHSIZE=${BATCHSIZE:-8} # per GPU
MASTER_PORT=${MASTER_PORT:-29500}
exec python -m torch.distributed.launch --nproc_per_node="$NUM_GPUS" --use_env \
    --master_port="$MASTER_PORT" train.py --distributed \
    --layers 50 --model_type res50_ASPP_lorm --batchsize "$BATCHSIZE" "$@"
