#!/usr/bin/env bash
# Train on CamVid (480 x 360, 11 classes, dense masks) from scratch on one GPU: docs/numbers.md.
#   benchmarks/camvid.sh DATA OUTPUT [further flags]
# DATA holds train/*.jpg, trainannot/*.png, val/*.jpg, valannot/*.png.
# Writes OUTPUT/lorm and OUTPUT/plain; LORM=on or LORM=off runs one of the two.
set -euo pipefail
data=$1 output=$2
shift 2

train() { # name, model, further flags
    local folder=$1 model=$2
    shift 2
    "${PYTHON:-python}" -m lockstep_recipes.segmentation \
        --dataset_path "$data" --dataset Full --num_classes 11 --void 11 --output_dir "$output/$folder" \
        --model_type "$model" --batchsize 8 --crop_size 361 481 --scale 0.75 1.75 \
        --lr 0.02 --lr_scaling none --warmup_epochs 5 --epochs 50 --workers 14 \
        --eval_batchsize 8 --eval_interval 10 --save_interval 50 --log_interval 45 "$@"
}

[ "${LORM:-both}" = off ] || train lorm res50_ASPP_lorm --l_lorm 0.03 "$@"
[ "${LORM:-both}" = on ] || train plain res50_ASPP "$@"
