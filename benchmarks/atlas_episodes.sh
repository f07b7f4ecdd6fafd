#!/usr/bin/env bash
# Train a policy on real recordings (one robot, 26 joints, one camera) on one GPU: docs/numbers.md.
#   benchmarks/atlas_episodes.sh DATA OUTPUT [further flags]
# DATA is robots.tar.xz or its folder, with meta.jsonl (recipes/atlas/README.md).
# Writes OUTPUT/episodes (65 to train on, 16 held out) and OUTPUT/run. WIDTH=7 or 12: another robot.
set -euo pipefail
data=$1 output=$2
shift 2

width=${WIDTH:-26}
gripper=false views=[workspace]
case $width in
    7) gripper=true views=[workspace,image_1,image_2] ;;
    12) views=[workspace,cam1] ;;
esac
python=${PYTHON:-python}

[ -d "$output/episodes" ] ||
    "$python" -m lockstep_recipes.atlas.convert "$data" "$output/episodes" --width "$width"

# Nothing pretrained is at hand, so nothing is frozen. The robot's own joints and its last two
# actions are shown, and the change from the last action is predicted.
settings=(
    data.data_dir="$output/episodes" checkpoint.save_dir="$output/run"
    model.action_dim="$width" model.has_gripper="$gripper" data.views="$views"
    model.freeze_vggt=false model.vggt_preset=tiny model.fusion_hidden_dim=256
    model.dropout=0.1 model.predict_residual=true
    data.use_state=true data.use_last_action=true data.num_temporal_frames=2
    data.image_size=112 data.cache_images=true data.num_workers=4
    data.random_shift=6 data.color_jitter=0.2 data.batch_size=64
    training.learning_rate=5e-4 training.warmup_steps=100 training.weight_decay=0.05
    training.num_epochs=30 training.val_interval=300 training.log_interval=100
    checkpoint.epoch_interval=30
)
"$python" -m lockstep_recipes.atlas "${settings[@]/#/--set=}" "$@"
