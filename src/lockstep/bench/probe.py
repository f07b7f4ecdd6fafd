"""Measure one rank of a run: its steps, backward passes, exchanges and input.

Owns: the numbers that each rank writes down, and how its gradients are kept local. Steps as they
are and steps with local gradients take turns, so that a machine that slows down does so for both.
Does not own: when a step is taken (`callback.py`), or what the numbers mean.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.collectives import NUM_REPEATS, time_sizes, time_together
from lockstep.bench.profiled_steps import ProfiledSteps
from lockstep.bench.settings import BenchSettings
from lockstep.dist.collectives import GradBucket
from lockstep.dist.ddp import Averaging, replica_of, unwrap
from lockstep.dist.pace import Clock
from lockstep.errors import ConfigError
from lockstep.phases import Phase
from lockstep.run.run import Run
from lockstep.torch_compat.private import assign_buckets, zero_buckets

WARMUP_STEPS = 4
"""The first steps build buckets, choose kernels and fill caches."""
BLOCK = 4
"""Number of steps of one kind before as many of the other kind."""
BUCKET_LIMITS_BYTES = [1 << 20, 25 << 20]
"""The sizes of DistributedDataParallel's first bucket and of the others, unless set."""
INPUT_S = 1.5
INPUT_STEPS = 200
"""The longest time, and the most steps, for which the input is read by itself."""


class LocalAveraging(Averaging):
    """The run's own averaging, with a switch to keep gradients on this rank."""

    def __init__(self, averaging: Averaging) -> None:
        super().__init__(averaging.world, averaging.dtype)
        self.averaging = averaging
        self.is_local = False

    def exchange(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Start averaging a bucket, or return it at once."""
        if not self.is_local:
            return self.averaging.exchange(bucket)
        device = self.world.device
        devices: Any = [device] if device.type == "cuda" else None
        local: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        local.set_result(bucket.buffer())
        return local


@dataclass
class Step:
    """The moments of one step."""

    is_local: bool
    """Whether gradients are kept local."""
    began: Any
    done: Any = None
    """When the weights had changed."""
    ended: Any = None
    """When the next step began."""
    wait_s: float = 0.0
    backwards: list[tuple[Any, Any]] = field(default_factory=list)
    """Start and end of the backward pass of each micro-batch."""
    ready: dict[str, Any] = field(default_factory=dict)
    """When each parameter's gradient was computed, in the last backward pass."""


class Probe:
    """Measures one rank of one run.

    Args:
        run: Before its first step.
        settings: How much to measure.
        folder: Gets the file of this rank.
        remarks: What a reader of the figures must know; they go into the file.
    """

    def __init__(self, run: Run, settings: BenchSettings, folder: Path, remarks: list[str]) -> None:
        self.run = run
        self.settings = settings
        self.folder = folder
        self.remarks = remarks
        self.clock = Clock(run.world.device)
        self.has_all_steps = False
        """Whether every step was taken that is to be timed, traced or counted."""
        self.steps: list[Step] = []
        self.profiled: ProfiledSteps | None = None
        self.num_begun = 0
        self.num_sums = 0
        """Collectives in the timed steps."""
        self.ready_s: dict[str, float] = {}
        """When each parameter's gradient is computed, from the start of a step."""
        self._current: Step | None = None
        """The step under way, if it is timed."""
        self._is_in_step = False
        self._wait_began = 0.0
        self._backward_began: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        self.averaging: LocalAveraging | None = None
        if run.averaging is not None and replica_of(run.model) is not None:
            self.averaging = LocalAveraging(run.averaging)
            run.averaging = self.averaging
            run.replicate()
        named = unwrap(run.model).named_parameters()
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._note_ready(name))  # type: ignore[no-untyped-call]
            for name, p in self.parameters.items()
        ]
        run.world.phase.listeners.append(self._note_phase)

    # --- While it trains ---

    def start_step(self) -> None:
        """Begin a step: one of the warm-up, a timed or a profiled one."""
        mark = self.clock.mark()
        if self.profiled is not None:
            self._write({"event": "profiling", "taken": self.num_begun})
            self.num_begun += 1
            self.profiled.start_step()
            return
        if self._current is not None and self._current.done is None:
            self.steps.pop()  # it ran out of memory, and is taken again
        elif self._current is not None:
            self._current.ended = mark
        if len(self.steps) == 2 * self.settings.steps:
            self._end_timing()
            if self.settings.profiles:
                self.profiled = ProfiledSteps(self.run, self.clock.synchronize)
                self.start_step()
            return
        if self.num_begun >= WARMUP_STEPS:
            self._start_timed_step(mark)
        if self.num_begun % BLOCK == 0:
            self._write({"event": "steps", "taken": self.num_begun})
        self.num_begun += 1

    def _start_timed_step(self, mark: Any) -> None:
        if self._current is None:
            self.num_sums = -self.run.world.num_collectives
        is_local = len(self.steps) // BLOCK % 2 == 1
        num_same = sum(step.is_local == is_local for step in self.steps)
        if num_same == self.settings.steps:
            is_local = not is_local
        self._current = Step(is_local, mark)
        self.steps.append(self._current)
        self._keep_local(is_local)

    def end_step(self) -> None:
        """Note that the weights have changed."""
        if self._current is not None:
            self._current.done = self.clock.mark()
        elif self.profiled is not None:
            self.profiled.end_step()
            self.has_all_steps = self.profiled.is_complete
        elif self.steps:  # one more, whose start ended the last timed step
            self.has_all_steps = True

    def _keep_local(self, is_local: bool) -> None:
        if self.averaging is not None:
            self.averaging.is_local = is_local

    def _end_timing(self) -> None:
        """Take steps as they are from here on."""
        self.clock.synchronize()
        self.num_sums += self.run.world.num_collectives
        self._current = None
        self._keep_local(False)
        for hook in self._hooks:
            hook.remove()

    def _note_ready(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self._current is not None and self._current.is_local:
                self._current.ready[name] = self.clock.mark()

        return note

    def _note_phase(self, phase: Phase, begins: bool) -> None:
        """Time backward passes on the device's clock, and the waiting for data on the host's."""
        if phase == "data":
            self._is_in_step = False
        elif phase == "forward" and begins and not self._is_in_step:
            self._is_in_step = True
            self.start_step()
        step = self._current
        if step is None:
            return
        if phase == "data" and begins:
            self._wait_began = time.perf_counter()
        elif phase == "data":
            step.wait_s += time.perf_counter() - self._wait_began
        elif phase == "backward" and begins:
            self._backward_began = self.clock.mark()
        elif phase == "backward":
            step.backwards.append((self._backward_began, self.clock.mark()))

    # --- Afterwards ---

    def finish(self) -> None:
        """Measure exchanges, input and machine, and write everything down. Collective."""
        self.clock.synchronize()
        figures = self._step_figures()
        if self.profiled is not None:
            self._write({"event": "limits"})
            figures["work"] = self.profiled.finish()
        self._write({"event": "exchanges"})
        figures |= self._exchange_figures()
        self._write({"event": "input"})
        figures["input_samples_per_s"] = input_samples_per_s(self.run, self.clock)
        self._write({"event": "measured", **self._facts(), **figures, "remarks": self.remarks})
        self.run.world.barrier()

    def _facts(self) -> dict[str, Any]:
        run, plan = self.run, self.run.contract.plan
        on_gpu = run.world.device.type == "cuda"
        return {
            "rank": run.world.rank,
            "size": run.world.size,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "backend": run.world.backend or "",
            "threads": torch.get_num_threads(),
            "num_workers": run.config.loader.num_workers,
            "global_batch": plan.global_batch,
            "micro_batches": plan.accumulate,
            "compile": run.config.compile,
            "parallel": run.config.parallel,
            "fixed_batch": run.config.batch.global_batch_size is not None,
            "parameters": sum(p.numel() for p in self.parameters.values()),
        }

    def _step_figures(self) -> dict[str, Any]:
        """Return the times of both kinds of steps, and of the parts of the local ones."""
        between = self.clock.between
        whole = [step for step in self.steps if not step.is_local]
        local = [step for step in self.steps if step.is_local]
        if not all(step.backwards and step.ready for step in local):
            raise ConfigError(
                "a step was taken without the backward pass of train_step",
                "call trainer.step(batch), or train_step with a loss of your own",
            )
        always = set.intersection(*(set(step.ready) for step in local))
        self.ready_s = {
            name: median(between(step.began, step.ready[name]) for step in local)
            for name in sorted(always)
        }
        return {
            "whole_s": [between(step.began, step.ended) for step in whole],
            "whole_wait_s": [step.wait_s for step in whole],
            "local_s": [between(step.began, step.ended) for step in local],
            "local_wait_s": [step.wait_s for step in local],
            "backward_s": [sum(between(*pair) for pair in step.backwards) for step in local],
            "backward_end_s": [between(step.began, step.backwards[-1][1]) for step in local],
            "body_s": [between(step.began, step.done) for step in local],
            "sums_per_step": self.num_sums / len(self.steps),
        }

    def _exchange_figures(self) -> dict[str, Any]:
        """Return the times of the run's own buckets by themselves, and of many sizes."""
        world, replica = self.run.world, replica_of(self.run.model)
        if replica is None or self.averaging is None:
            return {"buckets": self._forecast_buckets(), "exchange_s": 0.0, "sizes": []}
        averaging, buckets = self.averaging, zero_buckets(replica)

        def exchange_all() -> None:
            for future in [averaging.exchange(bucket) for bucket in buckets]:
                future.wait()

        exchange_all()
        times = [time_together(exchange_all, world, self.clock) for _ in range(NUM_REPEATS)]
        return {
            "buckets": [self._bucket(bucket.parameters()) for bucket in buckets],
            "exchange_s": median(times),
            "sizes": time_sizes(world, self.clock),
        }

    def _forecast_buckets(self) -> list[tuple[int, float]]:
        """Return the buckets there would be on several ranks."""
        names = sorted(self.ready_s, key=lambda name: self.ready_s[name])
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        size_mb = self.run.config.gradients.bucket_mb
        limits = [size_mb << 20] if size_mb else BUCKET_LIMITS_BYTES
        buckets = assign_buckets(parameters, limits)
        return [self._bucket([parameters[index] for index in indices]) for indices in buckets]

    def _bucket(self, parameters: list[Tensor]) -> tuple[int, float]:
        """Return the bytes that are sent for a bucket, and when it is ready."""
        dtype = self.run.config.gradients.dtype
        names = {id(p): name for name, p in self.parameters.items()}
        ready_s = max(self.ready_s.get(names[id(p)], 0.0) for p in parameters)
        return sum(p.numel() * (dtype or p.dtype).itemsize for p in parameters), ready_s

    def _write(self, values: dict[str, Any]) -> None:
        with (self.folder / f"rank_{self.run.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")


def input_samples_per_s(run: Run, clock: Clock) -> float:
    """Return how fast the loader of this rank reads when nothing else runs. Collective."""
    num_ahead = run.config.loader.num_workers * run.config.loader.prefetch
    run.world.barrier()
    num_samples = 0
    opened = began = time.perf_counter()
    for num_steps, batch in enumerate(run.loader, start=1):
        if num_steps <= 1 + num_ahead:  # these were read before the clock started
            began = time.perf_counter()
            continue
        num_samples += sum(len(micro.ids) for micro in batch.micro_batches if micro.counts)
        if num_steps >= INPUT_STEPS + num_ahead or time.perf_counter() - opened > INPUT_S:
            break
    clock.synchronize()
    seconds = time.perf_counter() - began
    return num_samples / seconds if num_samples else 0.0
