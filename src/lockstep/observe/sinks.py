"""Sinks of events besides the record: TensorBoard, Weights & Biases, a picture of the curves.

Owns: the names of numbers there, and that no error or delay of a sink affects the training.
Does not own: the record itself, which is complete without any sink.
"""

import functools
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import override

from lockstep.observe.curves import draw_curves
from lockstep.observe.events import Event
from lockstep.run_files import make_folder, read_bytes, replace_text

Warn = Callable[[str], None]

QUEUE_LIMIT = 10_000
"""Most events waiting for one sink: at about 1 kB each, 10 MB."""
STEP_NAMES = ("loss", "learning_rate", "grad_norm", "samples_per_second")
WANDB_TIMEOUT_S = 15.0
"""How long W&B may try to reach its server; W&B's default is 90 s."""


importing = threading.Lock()
"""Held while a sink imports, or draws, which imports. A process forked during an import would find
modules locked by a thread that it does not have, and hang. So after the first `Sinks`, forking
waits for this lock."""


@functools.cache
def _let_forks_wait() -> None:
    """Make every fork of this process wait until no sink imports."""
    os.register_at_fork(
        before=importing.acquire,
        after_in_parent=importing.release,
        after_in_child=importing.release,
    )


class SinkConfig(BaseModel):
    """The sinks of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "lockstep"
    wandb_name: str | None = None
    wandb_entity: str | None = None
    wandb_tags: tuple[str, ...] = ()
    curves: bool = True
    log_file: str | None = None
    """A file for the output of the first rank."""


class Sinks:
    """A listener that forwards events to sinks without ever waiting.

    Each sink is opened and fed by its own daemon thread, so a sink that hangs delays neither
    the training nor the others. A sink that cannot keep up loses events; one that fails is
    switched off; either is reported once through `warn`.

    Args:
        config: The sinks.
        folder: The run's folder.
        run_config: The run's configuration, for W&B.
        resume_step: The step of the checkpoint that the run resumes from, or None for a run
            from scratch, which starts new curves.
        warn: Called from a sink's thread. It may write a `warning` event, which sinks ignore.
    """

    def __init__(
        self,
        config: SinkConfig,
        folder: Path | str,
        run_config: Mapping[str, Any],
        *,
        resume_step: int | None,
        warn: Warn,
    ) -> None:
        folder = Path(folder)
        _let_forks_wait()  # before any thread that may import

        def say(message: str) -> None:
            with suppress(Exception):  # a failing warning must not stop the sink
                warn(message)

        builders: dict[str, Callable[[], Sink]] = {}
        if config.tensorboard:
            builders["TensorBoard"] = lambda: TensorBoardSink(folder, resume_step)
        if config.wandb:
            builders["W&B"] = lambda: WandbSink(config, folder, run_config, resume_step, say)
        if config.curves:
            builders["curves.png"] = lambda: CurvesSink(folder)
        self._feeds = [_Feed(name, build, say) for name, build in builders.items()]

    def __call__(self, event: Event) -> None:
        """Queue one event for every sink."""
        if event["event"] in ("step", "epoch", "evaluation", "picture"):
            for feed in self._feeds:
                feed.put(event)

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the sinks finish queued events, then abandon any that is still busy."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline)
        self._feeds = []


class Sink:
    """Base class of sinks; every method runs in the sink's thread and may raise."""

    def send(self, event: Event) -> None:
        """Handle one event."""
        raise NotImplementedError

    def flush(self) -> None:
        """Write events out, so that they survive a kill."""

    def close(self) -> None:
        """Finish."""


class _Feed:
    """One sink with its queue and its thread."""

    def __init__(self, name: str, build: Callable[[], Sink], warn: Warn) -> None:
        self._name = name
        self._build = build
        self._warn = warn
        # Unbounded, so that the end marker always fits; `put` keeps the limit.
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._num_lost = 0
        self._is_off = False
        self._thread = threading.Thread(target=self._run, name=f"lockstep {name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        if self._is_off:
            return
        if self._queue.qsize() < QUEUE_LIMIT:
            self._queue.put(event)
        else:
            self._num_lost += 1

    def end(self) -> None:
        self._queue.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive() and not self._is_off:
            self._warn(f"{self._name} did not finish in time; its last events may be missing there")
            self._is_off = True

    def _run(self) -> None:
        try:
            sink = self._build()
            while (event := self._queue.get()) is not None:
                sink.send(event)
                # Flush only if the queue is empty.
                if self._queue.empty():
                    sink.flush()
            sink.close()
        except BaseException as error:  # packages may even call `sys.exit`
            if not self._is_off:
                self._is_off = True
                self._warn(f"{self._name} is switched off: {_reason(error)}")
        if self._num_lost and not self._is_off:
            self._warn(f"{self._name} was too slow and lost {self._num_lost} events")


def _reason(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed (pip install {error.name})"
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event under their names in all sinks."""
    kind = event["event"]
    if kind == "step":
        parts = {f"train/{name}": value for name, value in (event.get("parts") or {}).items()}
        named = parts | {f"train/{name}": event[name] for name in STEP_NAMES if name in event}
        named |= event.get("logged") or {}
    elif kind == "epoch":
        named = {"train/epoch_loss": event["loss"]} if "loss" in event else {}
    elif kind == "evaluation":
        named = {f"val/{name}": value for name, value in (event.get("metrics") or {}).items()}
    else:
        named = {}
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float)}


def _picture(event: Event, folder: Path) -> Path | None:
    """Return the picture of an event, if it still exists."""
    if event["event"] != "picture":
        return None
    paths = (Path(event["path"]), folder / event["path"])
    return next((path for path in paths if path.is_file()), None)


def _picture_name(event: Event) -> str:
    return f"picture/{event['name']}" if "name" in event else "picture"


class TensorBoardSink(Sink):
    """`<folder>/tensorboard`, with a file per start; repeated steps are purged."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        with importing:
            from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        own_folder = make_folder(folder, "tensorboard")
        _wait_for_a_later_second(own_folder)
        # Purging hides this step and later ones; a run from scratch hides all.
        first_step = 0 if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(own_folder), purge_step=first_step)

    @override
    def send(self, event: Event) -> None:
        for name, value in _scalars(event).items():
            self._writer.add_scalar(name, value, event["step"], walltime=event.get("time"))
        path = _picture(event, self._folder)
        if path is not None:
            with importing:
                import numpy
                from PIL import Image

                with Image.open(path) as image:
                    pixels = numpy.asarray(image.convert("RGB"))
            self._writer.add_image(_picture_name(event), pixels, event["step"], dataformats="HWC")

    @override
    def flush(self) -> None:
        self._writer.flush()

    @override
    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_second(folder: Path) -> None:
    """Wait so that a new file sorts after the last one: names have a time in whole seconds."""
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdigit()), default=0)
    # A file from the future is from a machine whose clock is ahead: do not wait for it.
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))


class WandbSink(Sink):
    """One W&B run per training run, kept across resumes by the id in `<folder>/wandb_id`.

    Every number is plotted against `step`, which may go back on a resume, unlike W&B's own
    step. Without a login or a network, the run is written to `<folder>/wandb` for a later
    `wandb sync`. `WANDB_MODE` is respected.
    """

    def __init__(
        self,
        config: SinkConfig,
        folder: Path,
        run_config: Mapping[str, Any],
        resume_step: int | None,
        warn: Warn,
    ) -> None:
        with importing:
            import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            reinit="create_new",  # keep a W&B run of the user in this process
            init_timeout=WANDB_TIMEOUT_S,
            finish_timeout=WANDB_TIMEOUT_S,  # also limits the wait at exit
        )

        make_folder(folder, "wandb")
        run_id = _wandb_id(folder, is_new=resume_step is None)

        def start(mode: Any) -> Any:
            return wandb.init(
                project=config.wandb_project,
                name=config.wandb_name,
                entity=config.wandb_entity,
                tags=config.wandb_tags or None,
                config=dict(run_config),
                id=run_id,
                resume="allow",
                dir=str(folder),
                mode=mode,
                settings=settings,
            )

        # Otherwise `init` would ask for a key on the terminal, from this thread.
        is_online = wandb.setup(settings).settings.mode == "online"
        if is_online and not wandb.login(prompt=False, verify=False):
            warn(f"W&B has no login and writes offline; upload with: wandb sync {folder}/wandb/*")
            self._run = start("offline")
        else:
            try:
                self._run = start(None)
            except Exception as error:
                if not is_online:
                    raise
                warn(f"W&B cannot be reached and writes offline: {_reason(error)}")
                wandb.teardown()  # otherwise the failed attempt keeps the id occupied
                self._run = start("offline")
        self._folder = folder
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    @override
    def send(self, event: Event) -> None:
        payload: dict[str, Any] = dict(_scalars(event))
        path = _picture(event, self._folder)
        if path is not None:
            import wandb

            payload[_picture_name(event)] = wandb.Image(str(path))
        if payload:
            self._run.log({**payload, "step": event["step"]})

    @override
    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: Path, *, is_new: bool) -> str:
    if not is_new:
        with suppress(FileNotFoundError):
            return read_bytes(folder, "wandb_id", max_bytes=1000).decode().strip()
    run_id = secrets.token_hex(4)
    replace_text(folder, "wandb_id", run_id + "\n")
    return run_id


class CurvesSink(Sink):
    """`<folder>/curves.png`, drawn after evaluations and at the end.

    Drawing holds the interpreter, so it gets at most a twentieth of the time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._not_before = 0.0
        self._is_stale = False

    @override
    def send(self, event: Event) -> None:
        self._is_stale = True
        if event["event"] == "evaluation" and time.monotonic() >= self._not_before:
            self._draw()

    @override
    def close(self) -> None:
        if self._is_stale:
            self._draw()

    def _draw(self) -> None:
        began = time.monotonic()
        with importing:
            draw_curves(self._folder, self._folder / "curves.png")
        self._is_stale = False
        self._not_before = time.monotonic() + 20 * (time.monotonic() - began)
