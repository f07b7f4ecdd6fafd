"""What does the loop itself cost: microseconds a step, against a loop written by hand.

    python benchmarks/overhead.py [--device cuda] [--processes 1 2] [--rounds 5] [--json FILE]

One small model whose step is mostly launching kernels, the same data, AdamW, clipping at 1.0, a
log line every ten steps; bf16 on a GPU, float32 and one thread a process on the CPU. The hand-
written loop does no more than that. Lockstep is `fit` with everything it has on by default. Each
way runs in fresh processes, and rounds go through all ways in turn. The model itself looks at the
clock, so that all are timed at the same place; what counts is the time of ten steps with their log
line.

A machine may be a tenth slower a minute later. So in one process each way trains beside the hand-
written loop, which has a thread of its own: ten steps of one, ten of the other, in turn. `beside`
is the median over such pairs. By hand beside by hand is not quite 1, since the first thread is not
like the second: the ratio is against that. Several processes train one way alone, and their ratios
are of the rounds' medians.

The peers need `pip install accelerate lightning transformers`; one that is missing is named and
left out. Two processes on one GPU talk through gloo, as NCCL will not.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LOG_EVERY = 10
WARMUP_STEPS = 5 * LOG_EVERY
BATCH_SIZE, WIDTH, NUM_BLOCKS, NUM_CLASSES = 16, 64, 12, 10
RATE, MAX_NORM = 1e-3, 1.0
REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Settings:
    """What every way is given."""

    device: str
    num_steps: int
    num_workers: int
    folder: str
    rank: int = 0
    num_processes: int = 1

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def shares_gpu(self) -> bool:
        """Whether there are more processes than GPUs."""
        return self.on_gpu and self.num_processes > torch.cuda.device_count()


# --- What is trained ---------------------------------------------------------------------


class Turns:
    """Lets two threads train in turn, ten steps each."""

    def __init__(self) -> None:
        self._may_go = threading.Semaphore(1), threading.Semaphore(0)
        self._is_over = False
        self._of_thread = threading.local()

    def begin(self, place: int) -> None:
        """Wait for the turn of the thread that has place 0 or 1."""
        self._of_thread.place = place
        self._may_go[place].acquire()

    def pass_on(self) -> None:
        """Let the other thread train until it does the same; nothing where there is no other."""
        place = getattr(self._of_thread, "place", None)
        if place is not None and not self._is_over:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self._may_go[1 - place].release()
            self._may_go[place].acquire()

    def end(self) -> None:
        """Let the other thread go on alone."""
        self._is_over = True
        self._may_go[1 - self._of_thread.place].release()


TURNS = Turns()


class Blocks(nn.Module):
    """Residual blocks too small to keep a GPU busy; times every ten steps, with their log line."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 2 * WIDTH),
                nn.GELU(),
                nn.Linear(2 * WIDTH, WIDTH),
            )
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.num_steps, self.began = 0, 0.0
        self.spans_us: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.num_steps % LOG_EVERY == 0:
            if self.num_steps:
                self.spans_us.append(1e6 * (time.perf_counter() - self.began) / LOG_EVERY)
            TURNS.pass_on()
            self.began = time.perf_counter()
        self.num_steps += 1
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Labelled points in memory, more than a run of this benchmark comes to."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.points = torch.randn(4096, WIDTH, generator=generator)
        corners = torch.randn(WIDTH, NUM_CLASSES, generator=generator)
        self.labels = (self.points @ corners).argmax(dim=1)

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index % 4096], self.labels[index % 4096]


def build_model() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def build_optimizer(model: nn.Module, fused: bool | None = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)


def build_loader(settings: Settings, is_shared_out: bool = False) -> DataLoader[Any]:
    """Return what reads the points; `is_shared_out` where nobody else gives ranks their own."""
    data = Points()
    sampler = DistributedSampler(data) if is_shared_out and settings.num_processes > 1 else None
    return DataLoader(
        data,
        BATCH_SIZE,
        shuffle=sampler is None,
        sampler=sampler,
        drop_last=True,
        num_workers=settings.num_workers,
        pin_memory=settings.on_gpu and settings.num_workers > 0,
    )


# --- The ways: each returns its model and the losses it logged ----------------------------

Result = tuple[Blocks, list[float]]


def by_hand(settings: Settings) -> Result:
    """Train as one would who knows torch well and wants nothing but speed."""
    device, size = torch.device("cpu"), settings.num_processes
    if settings.on_gpu:
        device = torch.device("cuda", settings.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if size > 1:
        has_own_gpu = settings.on_gpu and not settings.shares_gpu
        dist.init_process_group("nccl" if has_own_gpu else "gloo")
    model = bare = build_model().to(device)
    if size > 1:
        ids = [device.index] if settings.on_gpu else None
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=ids, gradient_as_bucket_view=True
        )
    optimizer, weights, logged = build_optimizer(model), list(model.parameters()), []
    with open(Path(settings.folder) / "log.jsonl", "a") as log:
        for step, (x, y) in enumerate(build_loader(settings, is_shared_out=True), start=1):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.on_gpu):
                loss = cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % LOG_EVERY == 0:
                mean = loss.detach()
                if size > 1:
                    dist.all_reduce(mean)
                logged.append(mean.item() / size)
                if settings.rank == 0:
                    log.write(json.dumps({"step": step, "loss": logged[-1]}) + "\n")
                    log.flush()
            if step == settings.num_steps:
                break
    if size > 1:
        dist.destroy_process_group()
    return bare, logged


def with_lockstep(settings: Settings) -> Result:
    from lockstep import RunConfig, Task, fit, read_events

    class Classify(Task):
        name = "overhead"

        def build_model(self) -> Blocks:
            self.model = build_model()
            return self.model

        def build_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
            return build_optimizer(model)

        def train_data(self) -> Points:
            return Points()

        def loss(self, model: nn.Module, batch: Any, context: Any) -> Tensor:
            x, y = batch
            return cross_entropy(model(x), y)

    task = Classify()
    config = RunConfig.parse(
        {
            "output_dir": settings.folder,
            "max_steps": settings.num_steps,
            "batch": {"batch_size": BATCH_SIZE},
            "rate": {"lr": RATE},
            "precision": "bf16" if settings.on_gpu else "fp32",
            "max_grad_norm": MAX_NORM,
            "loader": {"num_workers": settings.num_workers},
            "device": settings.device,
            "log_every": LOG_EVERY,
        }
    )
    fit(task, config)
    steps = [e for e in read_events(settings.folder, settings.rank) if e["event"] == "step"]
    return task.model, [event["loss"] for event in steps]


def with_accelerate(settings: Settings) -> Result:
    from accelerate import Accelerator, InitProcessGroupKwargs

    group = InitProcessGroupKwargs(backend="gloo") if settings.shares_gpu else None
    accelerator = Accelerator(
        cpu=not settings.on_gpu,
        mixed_precision="bf16" if settings.on_gpu else "no",
        kwargs_handlers=[group] if group else None,
    )
    bare = build_model()
    model, optimizer, loader = accelerator.prepare(
        bare, build_optimizer(bare), build_loader(settings)
    )
    logged = []
    for step, (x, y) in enumerate(loader, start=1):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            logged.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.print(f"step {step}: loss {logged[-1]:.4f}")
        if step == settings.num_steps:
            break
    accelerator.end_training()
    return bare, logged


def for_lightning(settings: Settings, ddp: Callable[..., Any]) -> dict[str, Any]:
    """Return where to train, in the words that both of Lightning's loops take."""
    size, strategy = settings.num_processes, "ddp" if settings.num_processes > 1 else "auto"
    where = {"accelerator": settings.device, "devices": size, "strategy": strategy}
    if settings.shares_gpu:  # it can be told so only as nodes of one GPU each
        os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": str(settings.rank)}
        where |= {"devices": 1, "num_nodes": size, "strategy": ddp(process_group_backend="gloo")}
    return {**where, "precision": "bf16-mixed" if settings.on_gpu else "32-true"}


def with_fabric(settings: Settings) -> Result:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(**for_lightning(settings, DDPStrategy))
    fabric.launch()
    bare = build_model()
    model, optimizer = fabric.setup(bare, build_optimizer(bare))
    loader = fabric.setup_dataloaders(build_loader(settings))
    logged = []
    for step, (x, y) in enumerate(loader, start=1):
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            logged.append(fabric.all_reduce(loss.detach()).item())
            fabric.print(f"step {step}: loss {logged[-1]:.4f}")
        if step == settings.num_steps:
            break
    return bare, logged


def with_lightning(settings: Settings) -> Result:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy

    class Classify(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            x, y = batch
            loss = cross_entropy(self.model(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # In mixed precision it refuses to clip for a fused optimizer; torch then takes foreach.
            return build_optimizer(self.model, fused=None if settings.on_gpu else True)

    module = Classify()
    trainer = Trainer(
        **for_lightning(settings, DDPStrategy),
        max_steps=settings.num_steps,
        gradient_clip_val=MAX_NORM,
        log_every_n_steps=LOG_EVERY,
        logger=CSVLogger(settings.folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, build_loader(settings))
    return module.model, [float(trainer.callback_metrics["loss"])]


def with_transformers(settings: Settings) -> Result:
    from transformers import Trainer, TrainingArguments

    class Classify(Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **others: Any
        ) -> Tensor:
            return cross_entropy(model(inputs["x"]), inputs["labels"])

    def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        points, labels = zip(*samples, strict=True)
        return {"x": torch.stack(points), "labels": torch.stack(labels)}

    through_gloo = settings.num_processes > 1 and (settings.shares_gpu or not settings.on_gpu)
    arguments = TrainingArguments(
        output_dir=settings.folder,
        max_steps=settings.num_steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.01,
        max_grad_norm=MAX_NORM,
        bf16=settings.on_gpu,
        use_cpu=not settings.on_gpu,
        ddp_backend="gloo" if through_gloo else None,
        dataloader_num_workers=settings.num_workers,
        dataloader_pin_memory=settings.on_gpu and settings.num_workers > 0,
        remove_unused_columns=False,
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = build_model()
    trainer = Classify(model, arguments, train_dataset=Points(), data_collator=collate)
    trainer.train()
    history = trainer.state.log_history
    return model, [line["loss"] for line in history if "loss" in line]


WAYS: dict[str, tuple[Callable[[Settings], Result], str]] = {
    "by hand": (by_hand, "torch"),
    "lockstep": (with_lockstep, "lockstep"),
    "Accelerate": (with_accelerate, "accelerate"),
    "Fabric": (with_fabric, "lightning"),
    "Lightning": (with_lightning, "lightning"),
    "Transformers": (with_transformers, "transformers"),
}
"""Each way, and the package it needs."""


# --- Measuring -----------------------------------------------------------------------------


def work(way: str, settings: Settings) -> None:
    """Train one way, as one of its processes, and leave behind what was measured."""
    torch.set_num_threads(1)
    if settings.num_processes > 1:
        (model, logged), beside = WAYS[way][0](settings), None
    else:
        (model, logged), (beside, _) = beside_by_hand(way, settings)
    spans = model.spans_us[WARMUP_STEPS // LOG_EVERY :]
    found = {"step_us": statistics.median(spans), "fastest_us": min(spans)}
    found |= {"loss": logged[-1], "steps": model.num_steps}
    if beside is not None:
        found["ratios"] = ratios(spans, beside.spans_us[WARMUP_STEPS // LOG_EVERY :])
    (Path(settings.folder) / f"found_{settings.rank}.json").write_text(json.dumps(found))


def beside_by_hand(way: str, settings: Settings) -> tuple[Result, Result]:
    """Train one way, and by hand in another thread, ten steps each in turn."""
    global TURNS
    TURNS, results = Turns(), list[Result]()

    def train(way: str, place: int) -> None:
        TURNS.begin(place)
        torch.set_num_threads(1)  # a thread's own setting
        try:
            results.append(WAYS[way][0](settings))
        finally:
            TURNS.end()

    other = threading.Thread(target=train, args=("by hand", 0))
    other.start()
    try:
        train(way, 1)  # the main thread: some want to hear of signals
    finally:
        other.join()
    beside, own = results  # it began first, and so ends first
    return own, beside


def ratios(spans: list[float], beside: list[float]) -> list[float]:
    """Return each span against the mean of what the other took just before and just after."""
    around = zip(spans, beside, beside[1:], strict=False)
    return [2 * own / (before + after) for own, before, after in around]


def take_round(way: str, num_processes: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one way in fresh processes; return what the slowest of them measured."""
    here = [str(Path(__file__).resolve()), "--as", way, "--device", args.device]
    here += ["--steps", str(args.steps), "--workers", str(args.workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable]
    if num_processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc_per_node={num_processes}"]
    else:  # one GPU to see, or some would use all of them
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [*start, *here, "--folder", folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        found = [json.loads(file.read_text()) for file in Path(folder).glob("found_*.json")]
    if ran.returncode or [one["steps"] for one in found] != [args.steps] * num_processes:
        raise RuntimeError(f"{way}, {num_processes} processes: exit {ran.returncode}\n{ran.stdout}")
    return max(found, key=lambda one: one["step_us"])


def measure(ways: list[str], num_processes: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for every way, from rounds that go through all of them in turn."""
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(args.rounds):
        for way in list(rounds) if number % 2 == 0 else list(reversed(rounds)):
            try:
                rounds[way].append(take_round(way, num_processes, args))
                spent = f"{rounds[way][-1]['step_us']:.0f} us a step"
                print(f"round {number + 1}, {num_processes} x {way}: {spent}", flush=True)
            except RuntimeError as error:
                if WAYS[way][1] in ("torch", "lockstep"):
                    raise
                print(f"left out: {str(error)[-2000:]}")
                del rounds[way]
    return summarise(rounds, num_processes)


def summarise(
    rounds: dict[str, list[dict[str, float]]], num_processes: int
) -> list[dict[str, Any]]:
    """Return the median of the rounds of each way, and its ratio to the first way's."""
    rows: list[dict[str, Any]] = []
    for way, found in rounds.items():
        times = [one["step_us"] for one in found]
        row: dict[str, Any] = {"way": way, "processes": num_processes, "rounds_us": times}
        row["step_us"] = statistics.median(times)
        pairs = [ratio for one in found for ratio in one.get("ratios", [])]
        row["beside"] = statistics.median(pairs) if pairs else row["step_us"]
        row["ratio"] = row["beside"] / (rows[0] if rows else row)["beside"]
        row["num_pairs"] = len(pairs)
        row["half_of_them"] = statistics.quantiles(pairs, n=4)[::2] if len(pairs) > 1 else None
        row["fastest_us"] = min(one["fastest_us"] for one in found)
        row["loss"] = statistics.median(one["loss"] for one in found)
        rows.append(row)
    return rows


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader must know to repeat this."""
    git = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    versions = {"python": platform.python_version()}
    for name in ("torch", "accelerate", "lightning", "transformers"):
        if importlib.util.find_spec(name):
            versions[name] = importlib.metadata.version(name)
    asked = {"steps": args.steps, "rounds": args.rounds, "workers": args.workers}
    machine = {"device": device or platform.machine(), "cores": os.cpu_count()}
    return {"commit": commit or "unknown", "machine": machine, "versions": versions, **asked}


def build_parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="that read data, in each process")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as", dest="way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure and print the table."""
    parser = build_parser()
    args = parser.parse_args()
    if args.way:
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        place = (args.folder, rank, size)
        return work(args.way, Settings(args.device, args.steps, args.workers, *place))
    if args.steps < WARMUP_STEPS + 2 * LOG_EVERY:
        parser.error(f"--steps {args.steps} is too few: {WARMUP_STEPS} are for warming up")
    asked = [way for way in WAYS if way in args.ways or way == "by hand"]
    ways = [way for way in asked if importlib.util.find_spec(WAYS[way][1])]
    for way in asked:
        if way not in ways:
            print(f"left out: {way} ({WAYS[way][1]} is not installed)")
    rows = [row for size in args.processes for row in measure(ways, size, args)]
    print("| processes | way | us a step | rounds | ratio | beside | fastest ten | loss |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        times, half = row["rounds_us"], row["half_of_them"]
        beside = f"{row['beside']:.3f} of {row['num_pairs']}" if half else "-"
        beside += f", half in {half[0]:.3f}..{half[1]:.3f}" if half else ""
        print(
            f"| {row['processes']} | {row['way']} | {row['step_us']:.0f} | {min(times):.0f}.."
            f"{max(times):.0f} | {row['ratio']:.3f} | {beside} | {row['fastest_us']:.0f} | "
            f"{row['loss']:.3f} |"
        )
    if args.json:
        args.json.write_text(json.dumps({**facts(args), "rows": rows}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
