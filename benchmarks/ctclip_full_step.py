"""Time training steps of full-size CT-CLIP on one GPU, on random volumes made there.

    python benchmarks/ctclip_full_step.py [--batch_size 4] [--steps 10] [--json FILE]

480 x 480 x 240 voxels, patches of 20 x 20 x 10, 512 channels, a projection from 294,912
numbers: the recipe's own model, loss, optimizer and step, in bf16. Reading is left out.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from lockstep.data.batch import MicroBatch, StepBatch
from lockstep.data.order import Leaf
from lockstep.step.train_step import train_step
from lockstep.world import World
from lockstep_recipes.ctclip.config import CTClipConfig
from lockstep_recipes.ctclip.task import CTClipTask
from lockstep_recipes.ctclip.text import NUM_SPECIAL, Vocabulary

NUM_WORDS = 30_000
REPORT_WORDS = 300
WARMUP_STEPS = 3


def measure(batch_size: int, num_steps: int, loss: str) -> dict[str, float | str | int]:
    """Return what a step costs."""
    config = CTClipConfig.parse({"model": {"clip": {"loss": loss}}, "data": {"num_workers": 0}})
    task = CTClipTask(config)
    task.tokenize = Vocabulary([f"word{n}" for n in range(NUM_WORDS)], REPORT_WORDS)
    torch.manual_seed(0)
    with World.enter() as world:
        device = world.device
        model = task.build_model().to(device)
        optimizer = task.build_optimizer(model, lr=1.25e-6)
        shape = (batch_size, 1, *config.model.image_encoder.volume_shape)
        data = {
            "volume": torch.rand(shape, device=device, dtype=torch.float16) * 2 - 1,
            "tokens": torch.randint(
                NUM_SPECIAL, NUM_WORDS, (batch_size, REPORT_WORDS), device=device
            ),
        }
        ids = np.arange(batch_size)
        micro_batch = MicroBatch(Leaf(0, 0, 0, batch_size), ids, data)
        autocast = torch.autocast(device.type, torch.bfloat16)
        times = []
        for step in range(WARMUP_STEPS + num_steps):
            began = time.perf_counter()
            batch = StepBatch(step, 0, [micro_batch], (step + 1) * batch_size)
            report = train_step(
                task.loss, model, optimizer, batch, world, max_grad_norm=0.5, autocast=autocast
            )
            last_loss = float(report.loss)  # waits for the device
            if step == 0:
                first_loss = last_loss
            times.append(time.perf_counter() - began)
        is_gpu = device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
            "torch": str(torch.__version__),
            "loss": loss,
            "batch_size": batch_size,
            "parameters": sum(p.numel() for p in model.parameters()),
            "image_tower_parameters": sum(p.numel() for p in model.image_tower.parameters()),
            "image_projection_parameters": model.image_projection.weight.numel(),
            "first_loss": first_loss,
            "last_loss": last_loss,
            "steps": num_steps,
            "median_step_s": float(np.median(times[WARMUP_STEPS:])),
            "slowest_step_s": float(max(times[WARMUP_STEPS:])),
            "volumes_per_s": batch_size / float(np.median(times[WARMUP_STEPS:])),
            "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else 0.0,
        }


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--loss", choices=["softmax", "siglip"], default="softmax")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    measured = measure(args.batch_size, args.steps, args.loss)
    for name, value in measured.items():
        shown = value if isinstance(value, str) else f"{value:,}"
        print(f"{name:<30}{f'{value:,.4f}' if isinstance(value, float) else shown:>24}")
    if args.json:
        args.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
