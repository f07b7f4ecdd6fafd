"""Where events go beside the record: TensorBoard, Weights & Biases, a picture of the curves.

Owns: the names the numbers get there, and that nothing which happens to a sink
reaches the training: no error, no wait. Does not own: the record itself, which is
whole without any sink.
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
"""Events waiting for one sink: at about 1 kB each, 10 MB."""
STEP_NAMES = ("loss", "learning_rate", "grad_norm", "samples_per_second")
WANDB_TIMEOUT_S = 15.0
"""How long W&B may try to reach its server; its own default is 90 s."""


importing = threading.Lock()
"""Held while a sink imports, or draws, which imports. A process that is forked in the midst of that
finds modules locked by a thread it does not have, and waits for ever: so forking waits instead,
from the first `Sinks` on."""


@functools.cache
def _let_forks_wait() -> None:
    """Have every fork of this process wait until no sink imports."""
    os.register_at_fork(
        before=importing.acquire,
        after_in_parent=importing.release,
        after_in_child=importing.release,
    )


class SinkConfig(BaseModel):
    """Which sinks a run feeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensorboard: bool = False
    wandb: bool = False
    wandb_project: str = "lockstep"
    wandb_name: str | None = None
    wandb_entity: str | None = None
    wandb_tags: tuple[str, ...] = ()
    curves: bool = True
    log_file: str | None = None
    """Where to keep what the first rank prints, as well."""


class Sinks:
    """A listener that hands events on without ever waiting.

    Each sink is opened and fed by a daemon thread of its own, so that one that
    hangs holds up neither the training nor the others. A sink that cannot keep up
    loses events; one that fails is switched off; either is said once through `warn`.

    Args:
        config: Which sinks.
        folder: The run's folder.
        run_config: What W&B shows as the run's configuration.
        resume_step: The step of the checkpoint the run goes on from, or None for a run
            from the start, which begins new curves.
        warn: Called from a sink's thread. It may write a `warning` event: sinks ignore those.
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
        _let_forks_wait()  # before there is a thread that may import

        def say(message: str) -> None:
            with suppress(Exception):  # there would be no one left to tell
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
        """Let the sinks finish what is queued, then leave whatever is still busy behind."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            feed.join(deadline)
        self._feeds = []


class Sink:
    """What a feed drives; every method runs in the feed's thread and may raise."""

    def send(self, event: Event) -> None:
        """Take one event."""
        raise NotImplementedError

    def flush(self) -> None:
        """Make what was taken outlive a kill."""

    def close(self) -> None:
        """Finish."""


class _Feed:
    """One sink with its queue and its thread."""

    def __init__(self, name: str, build: Callable[[], Sink], warn: Warn) -> None:
        self._name = name
        self._build = build
        self._warn = warn
        # Unbounded as a type, so that the end mark always fits; `put` keeps the bound.
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
                # What is flushed outlives a kill; under pressure, the queue comes first.
                if self._queue.empty():
                    sink.flush()
            sink.close()
        except BaseException as error:  # a package may even call `sys.exit`
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
    """Return the numbers of an event under the names all sinks use."""
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
    """Return the picture an event is about, if it is still there."""
    if event["event"] != "picture":
        return None
    paths = (Path(event["path"]), folder / event["path"])
    return next((path for path in paths if path.is_file()), None)


def _picture_name(event: Event) -> str:
    return f"picture/{event['name']}" if "name" in event else "picture"


class TensorBoardSink(Sink):
    """`<folder>/tensorboard`, one more file per start; the steps trained again are purged."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        with importing:
            from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        own_folder = make_folder(folder, "tensorboard")
        _wait_for_a_later_second(own_folder)
        # Purging hides this step and later ones. A run from the start hides all.
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
    """Let a quick restart's file sort after the last: names hold the time in whole seconds."""
    seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdigit()), default=0)
    # A newer file than now was written by a machine whose clock is ahead: do not wait for that.
    time.sleep(min(1.0, max(0.0, newest + 1 - time.time())))


class WandbSink(Sink):
    """One W&B run per training run, kept across resumes by the id in `<folder>/wandb_id`.

    Every number is plotted against `step`, which may go back on a resume; W&B's own
    step cannot. Without a login or a network the run is written to `<folder>/wandb` for
    `wandb sync` later. `WANDB_MODE` is honoured.
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
            reinit="create_new",  # a run of the user's own in this process stays untouched
            init_timeout=WANDB_TIMEOUT_S,
            finish_timeout=WANDB_TIMEOUT_S,  # also bounds the wait when the program exits
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

        # `init` alone would ask for a key on the terminal, from this thread.
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
                wandb.teardown()  # or the failed attempt keeps the id occupied
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

    Drawing takes Python's time, which the training shares: at most a twentieth of it.
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
