#!/usr/bin/env bash
# Train on several GPUs: ./train_multi_gpu.sh 4 [further flags of train.py]
set -euo pipefail
cd "$(dirname "$0")"

NUM_GPUS=${1:-2}
shift || true
BATCH_SIZE=${BATCH_SIZE:-64} # per GPU
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-1}
LR=${LR:-1e-4}
USE_AMP=${USE_AMP:-true}
MASTER_PORT=${MASTER_PORT:-29500}
EFFECTIVE_BATCH_SIZE=$((BATCH_SIZE * NUM_GPUS * GRADIENT_ACCUMULATION_STEPS))

echo "GPUs: $NUM_GPUS, batch size per GPU: $BATCH_SIZE, effective batch size: $EFFECTIVE_BATCH_SIZE"
flags=(--batch_size "$BATCH_SIZE" --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS" --lr "$LR")
[ "$USE_AMP" = true ] && flags+=(--use_amp)
exec torchrun --nproc_per_node="$NUM_GPUS" --master_port="$MASTER_PORT" train.py \
    --data_path ./data/train "${flags[@]}" "$@"
