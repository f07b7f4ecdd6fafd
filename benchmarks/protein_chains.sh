#!/usr/bin/env bash
# Train protein diffusion on 1,713 real chains on one GPU: the run behind docs/numbers.md.
#   benchmarks/protein_chains.sh DATA OUTPUT [further flags]
# DATA holds protein_chains.jsonl.gz and protein_splits.json. A step has 3 x 15 chains, about
# 10,000 residues, in micro-batches of like length; 38 steps an epoch, 53 epochs, 2,014 steps.
# Target: validation perplexity below 10 (uniform 20, unigram about 18).
set -euo pipefail
data=$1 output=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
cache=$output/cache
[ -e "$cache/train.txt" ] || "${PYTHON:-python}" "$here/recipes/protein/scripts/preprocess_dataset.py" \
    --jsonl "$data/protein_chains.jsonl.gz" --splits "$data/protein_splits.json" --output_dir "$cache"
exec "${PYTHON:-python}" -m lockstep_recipes.protein \
    --pdb_path "$cache" --cache_dir "$cache" --use_predefined_split --output_dir "$output" \
    --use_discrete_diffusion --num_diffusion_steps 1000 --schedule linear --loss elbo \
    --batch_size 15 --gradient_accumulation_steps 3 --epochs 53 --warmup_epochs 3 \
    --learning_rate 1e-3 --use_amp --num_workers 8 --num_designs 24 \
    --eval_interval 5 --save_interval 53 --log_interval 38 "$@"
