#!/usr/bin/env bash
# Train JiT-B/4 at 64 px on 20 classes of Tiny ImageNet on one GPU: the run behind docs/numbers.md.
#   benchmarks/jit_tiny_imagenet.sh DATA OUTPUT [further flags]
# DATA holds train/<class>/*.JPEG and val/<class>/*.JPEG.
set -euo pipefail
data=$1 output=$2
shift 2
exec "${PYTHON:-python}" -m lockstep_recipes.jit \
    --data_path "$data/train" --val_path "$data/val" --output_dir "$output" \
    --model JiT-B/4 --img_size 64 --batch_size 256 --epochs 48 --lr 2e-4 --warmup_epochs 3 \
    --use_amp --compile --num_workers 12 --ema_decays 0.999 0.99 \
    --eval_interval 8 --save_interval 24 --log_interval 39 --grid 80 --num_fid_samples 256 "$@"
