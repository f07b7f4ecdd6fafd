"""What is measured inside a training process: steps, backward passes, exchanges, input.

Owns: the numbers each rank writes down. Steps are taken as they are and, in
turn, with gradients kept local, so that a machine that slows down does so for both. Does not
own: when a step is taken, or what the numbers mean.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from lockstep.bench.look import Look
from lockstep.bench.part import WARMUP_STEPS, BenchPart
from lockstep.dist import ddp as parallel
from lockstep.dist.collectives import GradBucket
from lockstep.dist.ddp import unwrap
from lockstep.dist.pace import Clock
from lockstep.dist.world import World
from lockstep.errors import ConfigError
from lockstep.run.run import Run

BLOCK = 4
"""So many steps of one kind, then so many of the other."""
EXCHANGES = 8
"""How often the buckets of a step are exchanged by themselves."""
BUCKET_LIMITS_BYTES = [1 << 20, 25 << 20]
"""As DistributedDataParallel cuts them unless told otherwise."""
SIZES_BYTES = tuple(4096 * 4**power for power in range(7))
"""4 KiB to 16 MiB."""
SIZE_S = 0.3
"""How long one size may take, all repeats together, from the third on."""
INPUT_S = 1.5
INPUT_STEPS = 200
"""How long, and how many steps, the input is read by itself at most."""


@dataclass
class Step:
    """The moments of one step."""

    is_local: bool
    began: Any
    done: Any = None
    """When the loop's body was over: the weights have moved."""
    ended: Any = None
    """When the next step began."""
    wait_s: float = 0.0
    backwards: list[tuple[Any, Any]] = field(default_factory=list)
    ready: dict[str, Any] = field(default_factory=dict)
    """When each parameter's gradient was there, in the last backward pass."""


class Message:
    """A bucket of a size of one's own."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_bytes // 4, device=device)

    def buffer(self) -> Tensor:
        """Return what is to be averaged."""
        return self.tensor


class Probe:
    """Measures one rank of one run."""

    def __init__(self, part: BenchPart, folder: Path) -> None:
        self.part = part
        self.folder = folder
        self.remarks: list[str] = []
        self.steps: list[Step] = []
        self.num_seen = 0
        self.num_sums = 0
        self.found: dict[str, Any] = {}
        self.look: Look | None = None

    @property
    def current(self) -> Step | None:
        """Return the step under way, once the warm-up is over."""
        return self.steps[-1] if self.steps else None

    @property
    def is_local(self) -> bool:
        """Say whether gradients stay where they are."""
        return self.current is not None and self.current.is_local

    # --- Before the run is built ---

    def attach(self, world: World) -> None:
        """Come between the run and its exchanges, its small sums and its backward passes."""
        exchange, probe = parallel.Averaging.exchange, self
        self.exchange = exchange

        def maybe(
            own: parallel.Averaging, bucket: GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            if not probe.is_local:
                return exchange(own, bucket)
            devices: Any = [world.device] if world.device.type == "cuda" else None
            kept: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
            kept.set_result(bucket.buffer())
            own.num_sent += 1
            return kept

        parallel.Averaging.exchange = maybe  # type: ignore[method-assign,assignment]
        for name in ("all_sum", "all_max", "all_parts"):
            setattr(world, name, self._counted(getattr(world, name)))
        backward = Tensor.backward

        def timed(self: Tensor, *args: Any, **named: Any) -> None:
            step = probe.current
            if step is None:
                backward(self, *args, **named)  # type: ignore[no-untyped-call]
                return
            began = probe.clock.mark()
            backward(self, *args, **named)  # type: ignore[no-untyped-call]
            step.backwards.append((began, probe.clock.mark()))

        Tensor.backward = timed  # type: ignore[method-assign]

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self.num_sums += self.current is not None
            return call(*args, **named)

        return counted

    # --- While it trains ---

    def begin(self, run: Run) -> None:
        """Get to know the run."""
        self.run = run
        self.clock = Clock(run.world.device)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.parameters = {
            name: p for name, p in unwrap(run.model).named_parameters() if p.requires_grad
        }
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._note(name))  # type: ignore[no-untyped-call]
            for name, p in self.parameters.items()
        ]

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self.is_local:
                self.steps[-1].ready[name] = self.clock.mark()

        return note

    def next_step(self) -> bool:
        """Begin a step; say whether enough of them were taken. The last ones are not timed."""
        if self.look is not None:
            return self._look_on(self.look)
        mark, taken = self.clock.mark(), self.num_seen - WARMUP_STEPS
        if self.steps:
            self.steps[-1].ended = mark
        if taken >= 2 * self.part.steps:
            self._close()
            self.look = Look(self.run, self.clock.settle) if self.part.looks else None
            return self._look_on(self.look) if self.look is not None else True
        if taken >= 0:
            is_local = taken // BLOCK % 2 == 1
            full = sum(step.is_local == is_local for step in self.steps) >= self.part.steps
            self.steps.append(Step(is_local != full, mark))
        if taken % BLOCK == 0:
            self._write({"event": "steps", "taken": self.num_seen})
        self.num_seen += 1
        return False

    def _look_on(self, look: Look) -> bool:
        self._write({"event": "looking", "taken": self.num_seen})
        self.num_seen += 1
        return look.next_step()

    def looking(self) -> AbstractContextManager[None]:
        """Return the block inside which the step that was begun is to be taken."""
        return nullcontext() if self.look is None else self.look.looking()

    def step_done(self) -> None:
        """Note that the weights have moved."""
        if self.current is not None:
            self.current.done = self.clock.mark()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        began, step = time.perf_counter(), self.current
        yield
        if step is not None:
            step.wait_s += time.perf_counter() - began

    # --- Afterwards ---

    def _close(self) -> None:
        """Read the clock; what comes after is not timed."""
        self.clock.settle()
        for hook in self._hooks:
            hook.remove()
        self.found = self._steps() | {"sums_per_step": self.num_sums / len(self.steps)}
        self.steps = []

    def finish(self) -> None:
        """Measure what a step is made of, and write everything down. Collective."""
        found = self.found
        if self.look is not None:
            self._write({"event": "limits"})
            found |= {"work": self.look.finish()}
        self._write({"event": "exchanges"})
        found |= self._exchanges()
        self._write({"event": "input"})
        found |= self._input()
        self._write({"event": "measured", **self._facts(), **found, "remarks": self.remarks})
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

    def _steps(self) -> dict[str, Any]:
        """Return what the steps took, kind by kind, and where in the local ones the time went."""
        between = self.clock.between
        whole = [step for step in self.steps if not step.is_local]
        local = [step for step in self.steps if step.is_local]
        if not all(step.backwards and step.ready for step in local):
            raise ConfigError("a step was seen without loss.backward()", "the trainer's own step")
        backward = [sum(between(*pair) for pair in step.backwards) for step in local]
        backward_end = [between(step.began, step.backwards[-1][1]) for step in local]
        always = set.intersection(*(set(step.ready) for step in local))
        self.ready_s = {name: self._ready(local, name) for name in sorted(always)}
        return {
            "whole_s": [between(step.began, step.ended) for step in whole],
            "whole_wait_s": [step.wait_s for step in whole],
            "local_s": [between(step.began, step.ended) for step in local],
            "local_wait_s": [step.wait_s for step in local],
            "backward_s": backward,
            "backward_end_s": backward_end,
            "body_s": [between(step.began, step.done) for step in local],
        }

    def _ready(self, steps: list[Step], name: str) -> float:
        return median(self.clock.between(step.began, step.ready[name]) for step in steps)

    def _exchanges(self) -> dict[str, Any]:
        """Return what the run's own buckets take by themselves, and messages of many sizes."""
        model, world = self.run.model, self.run.world
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return {"buckets": self._buckets_alone(), "exchange_s": 0.0, "sizes": []}
        own = cast(parallel.Averaging, model.exchanges)
        buckets = model.reducer._get_zeros_like_grad_buckets()

        def exchange_all() -> None:
            for future in [self.exchange(own, bucket) for bucket in buckets]:
                future.wait()

        exchange_all()
        times = [time_together(exchange_all, world, self.clock) for _ in range(EXCHANGES)]
        return {
            "buckets": [self._bucket(bucket.parameters()) for bucket in buckets],
            "exchange_s": median(times),
            "sizes": time_sizes(world, self.clock),
        }

    def _buckets_alone(self) -> list[tuple[int, float]]:
        """Return the buckets there would be on several ranks, cut by torch's own hand."""
        names = sorted(self.ready_s, key=lambda name: self.ready_s[name])
        tensors: list[Tensor] = [self.parameters[name] for name in names]
        dense, order = [False] * len(names), list(range(len(names)))
        asked = self.run.config.gradients.bucket_mb
        limits = [asked << 20] if asked else BUCKET_LIMITS_BYTES
        cut, _ = _compute_bucket_assignment_by_size(tensors, limits, dense, order)
        return [self._bucket([tensors[index] for index in indices]) for indices in cut]

    def _bucket(self, parameters: list[Tensor]) -> tuple[int, float]:
        """Return the bytes that are sent of a bucket, and when it is ready."""
        sent_as = self.run.config.gradients.dtype
        places = {id(p): name for name, p in self.parameters.items()}
        ready_s = max(self.ready_s.get(places[id(p)], 0.0) for p in parameters)
        return sum(p.numel() * (sent_as or p.dtype).itemsize for p in parameters), ready_s

    def _input(self) -> dict[str, Any]:
        """Return how fast batches come when nobody trains on them."""
        run, began = self.run, 0.0
        num_ahead = run.config.loader.num_workers * run.config.loader.prefetch
        run.world.barrier()
        samples, steps = 0, 0
        opened = time.perf_counter()
        for batch in run.loader:
            steps += 1
            if steps <= 1 + num_ahead:  # these were read while nobody asked
                began = time.perf_counter()
                continue
            samples += sum(len(micro.ids) for micro in batch.micro_batches if micro.counts)
            if steps >= INPUT_STEPS + num_ahead or time.perf_counter() - opened > INPUT_S:
                break
        self.clock.settle()
        seconds = time.perf_counter() - began
        return {"input_samples_per_s": samples / seconds if samples else 0.0}

    def _write(self, said: dict[str, Any]) -> None:
        with (self.folder / f"rank_{self.run.world.rank}.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")


def time_together(action: Callable[[], object], world: World, clock: Clock) -> float:
    """Return how long something takes that all ranks begin together. Collective."""
    world.barrier()
    clock.settle()
    began = time.perf_counter()
    action()
    clock.settle()
    return time.perf_counter() - began


def _send(message: GradBucket, world: World) -> None:
    world.all_sum_later(message.buffer()).wait()


def time_sizes(world: World, clock: Clock) -> list[tuple[int, float]]:
    """Return what averaging a message takes, for several sizes. Collective."""
    found = []
    for num_bytes in SIZES_BYTES:
        message = cast(GradBucket, Message(num_bytes, world.device))
        times: list[float] = []
        spent_us = 0
        while len(times) < 3 or (len(times) < 3 * EXCHANGES and spent_us < SIZE_S * 1e6):
            times.append(time_together(partial(_send, message, world), world, clock))
            (spent_us,) = world.all_max(int(sum(times) * 1e6))  # all stop together
        found.append((num_bytes, median(times[1:])))
    return found
