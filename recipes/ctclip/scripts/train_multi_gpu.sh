#!/usr/bin/env bash
# Train on the GPUs of this machine: bash scripts/train_multi_gpu.sh [further flags of train.py]
# How many: num_processes in accelerate_config_single_node.yaml. Which: CUDA_VISIBLE_DEVICES.
set -euo pipefail
cd "$(dirname "$0")/.."

ACCELERATE_CONFIG=${ACCELERATE_CONFIG:-accelerate_config_single_node.yaml}
CONFIG=${CONFIG:-configs/base_config.yaml}
# Accelerate answers a bad file with a traceback; this answers with a line.
python -m lockstep_recipes.ctclip.launch "$ACCELERATE_CONFIG"
exec accelerate launch --config_file "$ACCELERATE_CONFIG" train.py --config "$CONFIG" "$@"
