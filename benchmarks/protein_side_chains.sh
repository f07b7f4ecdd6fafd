#!/usr/bin/env bash
# Train protein diffusion with side-chain angles on a few hundred full-atom chains on one GPU:
# docs/numbers.md.
#   benchmarks/protein_side_chains.sh DATA OUTPUT [further flags]
# DATA holds structures (.pdb, .cif, in any subfolder) and protein_splits.json.
# Target: an error of chi 1 below that of always the most common bin.
set -euo pipefail
data=$1 output=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
cache=$output/cache
[ -e "$cache/train.txt" ] || "${PYTHON:-python}" "$here/recipes/protein/scripts/preprocess_dataset.py" \
    --pdb_dir "$data" --splits "$data/protein_splits.json" --max_resolution 3.0 --output_dir "$cache"
exec "${PYTHON:-python}" -m lockstep_recipes.protein \
    --pdb_path "$cache" --cache_dir "$cache" --use_predefined_split --output_dir "$output" \
    --use_discrete_diffusion --num_diffusion_steps 1000 --schedule linear --loss elbo \
    --batch_size 15 --gradient_accumulation_steps 3 --epochs 100 --warmup_epochs 5 \
    --learning_rate 1e-3 --use_amp --num_workers 8 --num_designs 4 \
    --eval_interval 20 --save_interval 100 --log_interval 7 "$@"
