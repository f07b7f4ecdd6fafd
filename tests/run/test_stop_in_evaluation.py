"""A stop signal in an evaluation: the run saves at once, and evaluates first when it resumes."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import CheckpointStore, PartialLoss, RunConfig, World, fit, read_events, signals
from lockstep.data.workers import LoaderConfig
from lockstep.errors import CheckpointError, DataError, LockstepError, StopRequested
from lockstep.run.evaluation import evaluate
from lockstep.task import Context
from lockstep.testing import FakeWorld, TinyTask, run_ranks
from lockstep.trainer import RunResult, Trainer

NUM_STEPS = 6
EVALUATE_EVERY = 2
DECAY = 0.9


def signal_oneself(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask this process to stop, and wait until its run has heard of it."""
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 20
    while signals._active is None or signals._active.requested is None:
        assert time.monotonic() < deadline, "the signal was not noticed"
        time.sleep(0.001)


class Evaluated(TinyTask):
    """Goes through every part of an evaluation: counts units, measures twice, finishes in rounds.

    Five held-out batches, so that two ranks have different numbers of them.
    """

    def __init__(self) -> None:
        super().__init__(num_samples=20, num_held_out=10)
        self.num_passes = 0
        self.num_batches = 0

    def reach(self, moment: str, context: Context) -> None:
        """Do nothing; a test may stop the run here."""

    def metrics(self) -> Mapping[str, Any]:
        self.num_passes += 1
        self.num_batches = 0
        return {}

    def weights(self, batch: dict[str, Tensor], context: Context) -> dict[str, Tensor]:
        if not context.training:
            self.reach("units", context)
        return {"units": batch["units"].sum()}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> PartialLoss:
        if not context.training:
            self.num_batches += 1
            self.reach(f"pass {self.num_passes} batch {self.num_batches}", context)
        part = super().loss(model, batch, context)
        return PartialLoss(part.loss_sum / context.weights["units"], 1.0)

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        self.num_passes = 0
        for number in range(3):
            context.raise_if_stopping()
            self.reach(f"finish {number}", context)
        return {"seen": float(sum(p.detach().sum() for p in model.parameters()))}


class Interrupted(Evaluated):
    """Sends its own process a signal at one moment of one step's evaluation, on one rank."""

    def __init__(self, moment: str, rank: int, step: int) -> None:
        super().__init__()
        self.moment = moment
        self.rank = rank
        self.step = step

    def reach(self, moment: str, context: Context) -> None:
        here = (moment, context.world.rank, context.step)
        if here == (self.moment, self.rank, self.step) and signals._active.requested is None:
            signal_oneself()


def config_for(folder: Path, **changes: Any) -> RunConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": NUM_STEPS,
        "batch": {"batch_size": 2, "global_batch_size": 4},
        "rate": {"lr": 0.05},
        "averages": [DECAY],
        "evaluation": {"every_steps": EVALUATE_EVERY, "save_best": True},
        "checkpoint": {"every_epochs": None, "keep_last": 100},
        "sinks": {"curves": False},
        "log_every": 1,
        "device": "cpu",
        "timeout_s": 20,
    }
    return RunConfig.parse(values | changes)


def run(
    folder: Path,
    num_ranks: int,
    build: Callable[[], TinyTask] = Evaluated,
    before: Callable[[], None] = lambda: None,
    **changes: Any,
) -> list[Any]:
    """Run `fit`; return each rank's result, or its error as (class, text, exit code)."""

    def one_rank() -> Any:
        before()
        try:
            return fit(build(), config_for(folder, **changes))
        except LockstepError as error:
            return type(error).__name__, str(error), error.exit_code

    return run_ranks(num_ranks, one_rank, timeout_s=60)


def store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "checkpoints", recipe="tiny")


def measured(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of every evaluation by its step."""
    found = [event for event in read_events(folder) if event["event"] == "evaluation"]
    return {event["step"]: event["metrics"] for event in found}


def check_stopped(folder: Path, results: list[RunResult], step: int) -> None:
    """Check that a run has saved `step` without the evaluation that was interrupted there."""
    assert [(result.step, result.exit_code) for result in results] == [(step, 143)] * len(results)
    saved, rejected = store(folder).latest()
    assert saved is not None
    assert rejected == []
    assert (saved.step, saved.meta["metrics"]) == (step, {})
    assert saved.load("progress")["evaluation_pending"] is True
    assert step not in measured(folder)
    best = store(folder).aliases().get("best_model.pt", "none")
    assert best != f"step_{step:08d}"
    written = {event["event"]: event for event in read_events(folder, raw=True)}
    assert written["evaluation_interrupted"]["step"] == step
    assert (written["stop"]["reason"], written["stop"]["exit_code"]) == ("SIGTERM", 143)


def check_same(folder: Path, undisturbed: Path) -> None:
    """Check that a run ended as one that nobody disturbed, to the last bit."""
    assert measured(folder) == measured(undisturbed)
    aliases = [store(one).aliases()["best_model.pt"] for one in (folder, undisturbed)]
    assert aliases[0] == aliases[1]
    ours, theirs = (store(one).latest()[0] for one in (folder, undisturbed))
    assert ours is not None
    assert theirs is not None
    assert ours.step == theirs.step == NUM_STEPS
    for part in ("model", f"average_{DECAY}"):
        for name, tensor in theirs.load(part).items():
            assert torch.equal(ours.load(part)[name], tensor), (part, name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the folder of a run on so many ranks that ended by itself."""
    done: dict[int, Path] = {}

    def folder_of(num_ranks: int) -> Path:
        if num_ranks not in done:
            done[num_ranks] = tmp_path_factory.mktemp(f"undisturbed_{num_ranks}")
            run(done[num_ranks], num_ranks)
        return done[num_ranks]

    return folder_of


@pytest.mark.parametrize(
    ("num_ranks", "rank", "moment", "step"),
    [
        (1, 0, "pass 1 batch 1", 2),
        (1, 0, "pass 1 batch 4", NUM_STEPS),
        (1, 0, "pass 2 batch 2", 4),
        (1, 0, "finish 0", 2),
        (2, 1, "units", 2),
        (2, 0, "pass 1 batch 1", 2),
        (2, 1, "pass 1 batch 3", 4),  # rank 0 has two batches
        (2, 0, "pass 1 batch 2", NUM_STEPS),  # its last
        (2, 1, "pass 2 batch 1", NUM_STEPS),
        (2, 1, "finish 1", 4),
    ],
)
def test_a_stop_in_an_evaluation_is_saved_at_once_and_the_evaluation_made_up_for(
    num_ranks: int,
    rank: int,
    moment: str,
    step: int,
    tmp_path: Path,
    undisturbed: Callable[[int], Path],
) -> None:
    stopped = run(tmp_path, num_ranks, lambda: Interrupted(moment, rank, step))
    check_stopped(tmp_path, stopped, step)
    resumed = run(tmp_path, num_ranks)
    assert [(result.step, result.exit_code) for result in resumed] == [(NUM_STEPS, 0)] * num_ranks
    check_same(tmp_path, undisturbed(num_ranks))
    kinds = [event["event"] for event in read_events(tmp_path, raw=True)]
    assert kinds[kinds.index("resume") + 1] == "evaluation", "it comes before the next step"


@pytest.mark.parametrize("changes", [{}, {"checkpoint": {"sharded": True, "keep_last": 1}}])
def test_an_evaluation_that_was_made_up_for_is_no_longer_owed(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path, 2, lambda: Interrupted("pass 1 batch 2", 0, NUM_STEPS), **changes)
    run(tmp_path, 2, **changes)
    saved, rejected = store(tmp_path).latest()
    assert saved is not None
    assert (saved.step, rejected) == (NUM_STEPS, [])
    assert saved.load("progress")["evaluation_pending"] is False
    assert saved.meta["metrics"] == measured(tmp_path)[NUM_STEPS]
    third = run(tmp_path, 2, **changes)
    assert [(result.step, result.exit_code) for result in third] == [(NUM_STEPS, 0)] * 2
    kinds = [event["event"] for event in read_events(tmp_path, raw=True)]
    after_third_start = kinds[-kinds[::-1].index("resume") :]
    assert "evaluation" not in after_third_start
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_an_evaluation_that_is_owed_may_be_interrupted_again(
    tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    run(tmp_path, 2, lambda: Interrupted("pass 1 batch 1", 0, 4))
    before = measured(tmp_path)
    again = run(tmp_path, 2, lambda: Interrupted("pass 2 batch 1", 1, 4))
    assert [(result.step, result.exit_code) for result in again] == [(4, 143)] * 2
    assert measured(tmp_path) == before
    run(tmp_path, 2)
    check_same(tmp_path, undisturbed(2))


def test_a_sharded_model_stops_between_two_forward_passes(tmp_path: Path) -> None:
    """Each of them is a collective: a rank that left alone would have the others wait."""
    changes: dict[str, Any] = {"parallel": "fsdp", "averages": []}
    stopped = run(tmp_path, 2, lambda: Interrupted("pass 1 batch 2", 1, 4), **changes)
    check_stopped(tmp_path, stopped, 4)
    assert [result.exit_code for result in run(tmp_path, 2, **changes)] == [0, 0]
    assert list(measured(tmp_path)) == [2, 4, 6]


def test_the_planted_fault_a_stop_that_forgets_the_evaluation_is_found(
    tmp_path: Path, undisturbed: Callable[[int], Path]
) -> None:
    def forget() -> None:
        real = Trainer.finish

        def finish(trainer: Trainer) -> RunResult:
            trainer.run.progress.evaluation_pending = False
            return real(trainer)

        Trainer.finish = finish  # type: ignore[method-assign]

    stopped = run(tmp_path, 1, lambda: Interrupted("pass 1 batch 1", 0, 4), forget)
    with pytest.raises(AssertionError):
        check_stopped(tmp_path, stopped, 4)
    run(tmp_path, 1)
    with pytest.raises(AssertionError):
        check_same(tmp_path, undisturbed(1))


# --- What user code may do ------------------------------------------------------------------


class Swallowing(Interrupted):
    """Carries on after whatever goes wrong while it finishes, as code around pictures does."""

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        try:
            return super().finish_evaluation(model, context, folder)
        except Exception:
            return {}


def test_a_task_that_survives_every_exception_still_stops(tmp_path: Path) -> None:
    stopped = run(tmp_path, 1, lambda: Swallowing("finish 1", 0, 2))
    check_stopped(tmp_path, stopped, 2)


class FailsOnOneRank(Evaluated):
    """Rank 1 meets a file it cannot read while rank 0 still asks whether to stop."""

    where = "finish 0"

    def reach(self, moment: str, context: Context) -> None:
        if moment == self.where and context.world.rank == 1:
            raise DataError("the planted picture cannot be read", "another folder")


class FailsInABatch(FailsOnOneRank):
    where = "pass 1 batch 1"


@pytest.mark.parametrize("kind", [FailsOnOneRank, FailsInABatch])
def test_a_rank_that_fails_meets_the_others_at_their_next_vote(
    kind: type[FailsOnOneRank], tmp_path: Path
) -> None:
    errors = run(tmp_path, 2, kind)
    assert errors[0] == errors[1]
    assert errors[0][::2] == ("DataError", 2)
    assert "rank 1: the planted picture cannot be read" in errors[0][1]
    saved, _ = store(tmp_path).latest()
    assert saved is not None
    assert (saved.step, saved.meta["metrics"]) == (EVALUATE_EVERY, {})
    assert [result.exit_code for result in run(tmp_path, 2)] == [0, 0]
    assert list(measured(tmp_path)) == [2, 4, 6]


def test_asking_outside_of_an_evaluation_does_nothing() -> None:
    Context(FakeWorld(), seed=0, step=0, place=0).raise_if_stopping()


class Counted(TinyTask):
    """Keeps a sum of its own, as torchmetrics do."""

    def __init__(self) -> None:
        super().__init__(num_held_out=10)
        self.num_seen = 0

    def reset(self) -> None:
        self.num_seen = 0

    def compute(self) -> float:
        return float(self.num_seen)

    def metrics(self) -> Mapping[str, Any]:
        return {"num_seen": self}

    def evaluate(self, model: nn.Module, batch: dict[str, Tensor], context: Context) -> Any:
        self.num_seen += len(batch["x"])
        return super().evaluate(model, batch, context)


def evaluate_until(num_batches: int) -> tuple[str, int]:
    """Evaluate in a custom loop, and stop before a batch on rank 1 alone."""
    task = Counted()
    asked: list[int] = []

    def stop_code() -> int:
        asked.append(1)
        return 143 if world.rank == 1 and len(asked) > num_batches else 0

    with World.enter("cpu", timeout_s=20) as world:
        options: dict[str, Any] = {"batch_size": 2, "seed": 0, "step": 0, "loader": LoaderConfig()}
        model = task.build_model()
        try:
            found = evaluate(task, model, task.eval_data(), world, **options, stop_code=stop_code)
        except StopRequested as request:
            assert model.training
            return f"stopped with {request.exit_code}", task.num_seen
        return f"loss {found['loss']:.6f}", len(asked)


def test_a_loop_of_ones_own_may_stop_an_evaluation_too() -> None:
    assert run_ranks(2, evaluate_until, 1) == [("stopped with 143", 0)] * 2  # metrics are reset
    (first, second) = run_ranks(2, evaluate_until, 9)
    assert first == second  # three votes each, though rank 0 has two batches
    assert first[1] == 3


# --- What could not be saved -----------------------------------------------------------------


def test_a_stop_whose_save_fails_does_not_claim_to_have_saved(tmp_path: Path) -> None:
    def fill_the_disk() -> None:
        def save(*_: Any) -> Path:
            raise CheckpointError("no room for step 4", "make room")

        CheckpointStore.save = save  # type: ignore[method-assign]

    (error,) = run(
        tmp_path,
        1,
        lambda: Interrupted("pass 1 batch 1", 0, 4),
        fill_the_disk,
        evaluation={"every_steps": 4, "save_best": True},
    )
    assert error == ("CheckpointError", "no room for step 4\n  try: make room", 5)


class Unheeding(TinyTask):
    """Finishes its evaluation without ever asking whether to stop, and is signalled twice."""

    def __init__(self, step: int, between: Callable[[], None]) -> None:
        super().__init__()
        self.step = step
        self.between = between

    def finish_evaluation(
        self, model: nn.Module, context: Context, folder: str
    ) -> dict[str, float]:
        if context.step == self.step:
            signal_oneself()
            self.between()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        return {}


def insist() -> None:
    """Let the second signal be a second one, and not the echo of the first."""
    assert signals._active is not None
    signals._active._history.last_at -= 2 * signals.DUPLICATE_S


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (
            {"every_steps": 3},
            "the steps since checkpoint step 3 will be repeated (the run was at 4)",
        ),
        (
            {"every_epochs": None},
            "there is no checkpoint yet, and the run, at step 4, will start over",
        ),
    ],
)
def test_a_second_signal_in_code_that_does_not_ask_says_what_is_lost(
    every: dict[str, Any], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = os.fork()
    if pid == 0:
        config = config_for(
            tmp_path,
            averages=[],
            evaluation={"every_steps": 4, "save_best": False},
            checkpoint={"background": False, **every},
        )
        fit(Unheeding(4, insist), config)
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    said = capfd.readouterr().err
    assert said == f"lockstep: stopped by SIGTERM without saving: {words}\n"
