#!/usr/bin/env bash
# Train on one GPU.
set -euo pipefail
cd "$(dirname "$0")"

BATCH_SIZE=${BATCH_SIZE:-64}
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-1}
LR=${LR:-5e-5}
USE_AMP=${USE_AMP:-true}

flags=(--batch_size "$BATCH_SIZE" --gradient_accumulation_steps "$GRADIENT_ACCUMULATION_STEPS" --lr "$LR")
[ "$USE_AMP" = true ] && flags+=(--use_amp)
exec python train.py --data_path ./data/train "${flags[@]}" "$@"
