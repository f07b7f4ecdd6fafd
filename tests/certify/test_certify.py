"""`lockstep certify`: each defect is found and called by its name, and sound runs are certified.

The defects run on forked ranks, really killed, which takes tenths of a second; the command line
itself is tried on started processes with one of them, and with the command in docs/certify.md.
"""

import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lockstep import Loader, World, train_step, unwrap
from lockstep.certify.callback import CALLBACK
from lockstep.certify.certificate import Certificate, certify_parity, certify_resume
from lockstep.certify.compare import compare, read_attempts, relative
from lockstep.certify.runs import check_killed
from lockstep.certify.settings import RunSettings
from lockstep.certify.trace import hash_of
from lockstep.certify.verdict import TRY, Finding, find_cause
from lockstep.cli.certify import certify, lines_of
from lockstep.errors import ConfigError, LaunchError
from lockstep.harness.attach import KILLED, TRACE, attached, write_settings
from lockstep.testing import TinyTask, run_ranks

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("uncertain.py")
DOCS = Path(__file__).parents[2] / "docs" / "certify.md"

pytestmark = pytest.mark.timeout(300)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("uncertain", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_forked(
    defect: str, folder: Path, names: list[str], num_ranks: int = 1
) -> Callable[[str, RunSettings, int], Path]:
    """Return what runs a defect on forked ranks, as the command line does on real processes."""
    script = load_script()

    def train(own: Path) -> int:
        os.environ |= attached(own, CALLBACK)
        code: int = script.main(defect, "unused")
        return code

    def run_command(name: str, settings: RunSettings, ranks: int) -> Path:
        own = folder / name
        own.mkdir(parents=True)
        write_settings(own, **asdict(settings))
        names.append(name)
        try:
            codes = run_ranks(ranks or num_ranks, train, own)
        except RuntimeError as error:
            if "ended without returning a result" not in str(error) or not (own / KILLED).exists():
                raise
            try:
                codes = run_ranks(ranks or num_ranks, train, own)
            except RuntimeError as refused:  # as the command line says it
                raise LaunchError(str(refused), "run the command by itself") from refused
        assert set(codes) == {0}
        return own

    return run_command


def prove_resume(
    defect: str, folder: Path, *, evaluates: bool = False
) -> tuple[Certificate, list[str]]:
    names: list[str] = []
    run_command = run_forked(defect, folder, names)
    return certify_resume(run_command, 6, evaluates=evaluates), names


def prove_parity(
    defect: str, folder: Path, gpus: tuple[int, ...] = (1, 2), *, exact: bool = False
) -> tuple[Certificate, list[str]]:
    names: list[str] = []
    run_command = run_forked(defect, folder, names)
    return certify_parity(run_command, gpus, 3, exact=exact), names


# --- Defects, by name --------------------------------------------------------

# defect: (what it is called, a part of what is said)
AFTER_A_RESUME = {
    "OwnOrder": ("data", "step 4, micro-batch 0: samples "),
    "ClockAugmentation": ("augmentation", "step 1, micro-batch 0: samples "),
    "OwnGenerator": (
        "RNG",
        "different inputs to the model; the state of task.noise differs, and is not saved",
    ),
    "RememberedLoss": ("task state", "task.mean differs, and is not saved"),
    "UnsavedCount": (
        "task state",
        "different inputs to the model; task.seen differs, and is not saved",
    ),
    "HiddenCount": ("task state", "the loss depends on something that no checkpoint holds"),
    "ForgottenCount": ("task state", "; state.seen of the task was not restored"),
    "UnseededData": ("initialisation", "the data set itself differs at every start, not how it is"),
    "UnseededModel": (
        "initialisation",
        "at the start: 0.bias, 0.weight, 3.bias and 1 more differ, although nothing was restored",
    ),
    "UnseededScale": ("initialisation", "; task.scale differs from the start"),
    "LostStatistics": (
        "BatchNorm",
        "resuming from step 3: 1.running_mean, 1.running_var were not restored",
    ),
    "FreshHead": ("weights", "resuming from step 3: 3.bias, 3.weight were not restored"),
    "OwnMomentum": (
        "optimizer",
        "step 4: the same gradient, but 0.bias, 0.weight, 3.bias and 1 more differ after the",
    ),
    "VolatileBuffer": ("buffers", "; 4.calls differs and is not in state_dict()"),
    "ModuleAttribute": ("buffers", "model.4.count differs, and is not saved"),
    "Kernel": ("kernels", "step 1, micro-batch 0: the same inputs and weights"),
    "RateSinceStart": ("learning rate", "step 4: learning rate 0.02 instead of 0.01458"),
    "OwnScaler": ("scaler", "resuming from step 3: _growth_tracker, scale were not restored"),
}
ON_OTHER_RANKS = {
    "RankOrder": ("data", "step 1, micro-batch 1: samples "),
    "RankAugmentation": ("augmentation", "step 1, micro-batch 1: samples "),
    "ShakenGather": ("augmentation", "the same samples look different"),
    "SizeByWorld": (
        "batch size",
        "at the start: 4 samples in a micro-batch instead of 8, 8 samples",
    ),
    "FewerForMore": ("data", "at the start: 24 training samples instead of 48"),
    "RankNoise": (
        "RNG",
        "step 1, micro-batch 1: the same batch, but different inputs to the model",
    ),
    "RankDropout": ("RNG", "step 1, micro-batch 1: the same inputs and weights"),
    "DividedByWorld": ("loss weighting", "the same outputs, but a loss of "),
    "OwnCount": ("loss weighting", "the same outputs, but a loss of "),
    "MisweighedAdversarial": ("loss weighting", "the same outputs, but a loss of "),
    "Normed": ("BatchNorm", "step 1: 1.num_batches_tracked, 1.running_mean, 1.running_var"),
    "RateByWorld": ("learning rate", "step 1: learning rate 0.08 instead of 0.04"),
    "DecayByWorld": (
        "optimizer",
        "step 2, micro-batch 0: the weights differ by more than rounding",
    ),
    "DetachedGather": ("gradient reduction", "step 1: the same losses, but a gradient of norm "),
}


IN_THE_DOCS = ("UnsavedCount", "UnseededData", "UnseededModel", "SizeByWorld", "TokenMean")


def check_docs(defect: str, finding: Finding) -> None:
    """See that docs/certify.md quotes the verdict, except for losses, which machines round."""
    said = f"differs first: {finding.cause}\n      {finding.says}\n      try: {finding.remedy}\n"
    without_losses = [re.sub(r"\d+\.\d+", "X", text) for text in (said, DOCS.read_text())]
    assert defect not in IN_THE_DOCS or without_losses[0] in without_losses[1]


@pytest.mark.parametrize("defect", AFTER_A_RESUME)
def test_a_defect_after_a_resume_is_called_by_its_name(defect: str, tmp_path: Path) -> None:
    cause, said = AFTER_A_RESUME[defect]
    certificate, _ = prove_resume(defect, tmp_path)
    finding = certificate.finding
    assert finding is not None
    assert finding.cause == cause, finding
    assert said in finding.says
    assert certificate.verdict == "differs"
    check_docs(defect, finding)


@pytest.mark.parametrize("defect", ON_OTHER_RANKS)
def test_a_defect_on_other_ranks_is_called_by_its_name(defect: str, tmp_path: Path) -> None:
    cause, said = ON_OTHER_RANKS[defect]
    certificate, names = prove_parity(defect, tmp_path)
    finding = certificate.finding
    assert finding is not None
    assert finding.cause == cause, finding
    assert said in finding.says
    assert names[-1] == "again", "it was made sure that the first run repeats"
    check_docs(defect, finding)


def test_ranks_that_grow_apart_are_refused_by_the_run_itself(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ranks have diverged: parameter 0.weight"):
        prove_parity("OneRanksWeight", tmp_path)


def test_a_count_of_calls_differs_with_the_number_of_ranks(tmp_path: Path) -> None:
    certificate, _ = prove_parity("UnsavedCount", tmp_path)
    assert certificate.finding is not None
    assert certificate.finding.cause == "task state"
    assert "task.seen differs with the number of ranks" in certificate.finding.says


def test_every_remedy_is_an_imperative() -> None:
    verbs = {
        "call",
        "draw",
        "keep",
        "let",
        "make",
        "pass",
        "remove",
        "return",
        "seed",
        "set",
        "use",
    }
    assert {remedy.split()[0] for remedy in TRY.values()} <= verbs


def test_an_attribute_that_never_repeats_is_not_taken_for_the_cause(tmp_path: Path) -> None:
    """A task that keeps the time of its start, beside a real defect."""
    certificate, names = prove_resume("StampedCount", tmp_path)
    assert certificate.finding is not None
    assert "; task.seen differs, and is not saved" in certificate.finding.says
    assert names[-1] == "again"


# --- How samples are cut into micro-batches ----------------------------------


def test_a_mean_over_units_that_samples_have_different_numbers_of_is_named(tmp_path: Path) -> None:
    """All numbers of ranks take the same micro-batches, and agree on what is wrong."""
    certificate, names = prove_parity("TokenMean", tmp_path)
    finding = certificate.finding
    assert finding is not None
    assert finding.cause == "loss weighting"
    assert "the loss is a mean over units that differ between samples (up to " in finding.says
    assert finding.remedy.startswith("return PartialLoss(sum, weight): the sum over units")
    check_docs("TokenMean", finding)
    first, cut = certificate.columns
    assert set(first.cells.values()) == {"same bits"}, "which is all that ranks can show"
    assert (cut.title, cut.cells) == ("regrouped", {"loss": "DIFFERS"})
    assert names == ["1 rank", "2 ranks"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("InBatch", "in three: the loss depends on batch_size"),
        ("Noisy", "how samples are divided into micro-batches (it draws random numbers)"),
        (
            "Adversarial",
            "how samples are divided into micro-batches (a custom loop takes its own steps)",
        ),
        ("Gathering", "how samples are divided into micro-batches (its loss compares samples)"),
        ("Fussy", "(the loss of fewer samples fails: ValueError: four samples, or none)"),
    ],
)
def test_what_cutting_cannot_show_is_a_remark(task: str, said: str, tmp_path: Path) -> None:
    certificate, _ = prove_parity(task, tmp_path)
    assert certificate.finding is None, certificate
    assert said in "\n".join(certificate.remarks)


@pytest.mark.parametrize("task", ["Sound", "SyncNormed", "Weighed"])
def test_a_sound_loss_is_the_same_however_samples_are_cut(task: str, tmp_path: Path) -> None:
    """Though there is dropout, batch normalisation, or a term with units of its own."""
    certificate, _ = prove_parity(task, tmp_path)
    assert certificate.finding is None, certificate
    assert certificate.remarks == []
    cut = certificate.columns[-1]
    assert cut.title == "regrouped"
    assert re.fullmatch(r"same bits|rounding \de-1\d", cut.cells["loss"])


# --- Sound runs --------------------------------------------------------------


def test_what_a_gan_trains_beside_its_model_is_rounded_too(tmp_path: Path) -> None:
    """The first loss of the model follows five updates of its critic, added up in another order."""
    certificate, names = prove_parity("Adversarial", tmp_path)
    assert certificate.finding is None, certificate
    assert names == ["1 rank", "2 ranks", "reordered"]
    one, two = (read_attempts(tmp_path / n / "trace")[0] for n in ("1 rank", "2 ranks"))
    first = next(m for m in compare(one, two, bits=False).measured if m.stage == "loss")
    assert (first.step, first.same_weights) == (1, True), "before the model's weights differ"


def test_a_sound_run_is_certified(tmp_path: Path) -> None:
    certificate, names = prove_resume("Sound", tmp_path, evaluates=True)
    assert certificate.finding is None, certificate
    assert names == ["straight", "interrupted"]
    first, second = read_attempts(tmp_path / "interrupted" / "trace")
    assert (max(first.steps), second.began_at, max(second.steps)) == (4, 3, 6), "really killed"
    assert second.plan["steps_per_epoch"] == 12, "in mid-epoch"
    (column,) = certificate.columns
    assert set(column.cells.values()) == {"same bits"}
    assert {"data", "augmentation", "loss", "optimizer", "weights"} <= set(column.cells)
    assert "killed after step 4, resumed from step 3" in certificate.proof


def test_numbers_from_numpy_in_a_loss_are_certified(tmp_path: Path) -> None:
    for prove in (prove_resume, prove_parity):
        certificate, _ = prove("GlobalNumpy", tmp_path / prove.__name__)
        assert certificate.finding is None, certificate


def test_two_ranks_are_killed_resumed_and_certified(tmp_path: Path) -> None:
    names: list[str] = []
    run_command = run_forked("SyncNormed", tmp_path, names, num_ranks=2)
    certificate = certify_resume(run_command, 3)
    said = lines_of(certificate, None)
    assert said[-1] == (
        "certified: resuming equals never stopping, bit for bit: 3 steps on 2 ranks, "
        "killed after step 2, resumed from step 1"
    )
    assert any(re.fullmatch(r"  BatchNorm +\d+  same bits", line) for line in said), said
    assert any(re.fullmatch(r"  ranks agree +\d+  same bits", line) for line in said), said


def test_ranks_are_certified_to_rounding_and_in_exact_mode_to_the_bit(tmp_path: Path) -> None:
    certificate, _ = prove_parity("Sound", tmp_path / "plain", (1, 3))
    assert certificate.finding is None, certificate
    assert "1 and 3 ranks are equal up to rounding: " in certificate.proof
    assert certificate.columns[0].cells["model outputs"] == "same bits"
    (one,), (three,) = (
        read_attempts(tmp_path / "plain" / n / "trace") for n in ("1 rank", "3 ranks")
    )
    finding = find_cause(compare(one, three, bits=True), "parity")
    assert finding is not None
    assert (finding.cause, "(only rounding)" in finding.says) == ("gradient reduction", True)
    certificate, names = prove_parity("Sound", tmp_path / "exact", (1, 3), exact=True)
    assert certificate.finding is None, certificate
    assert names == ["1 rank", "3 ranks"], "no tolerance to measure"
    assert set(certificate.columns[0].cells.values()) == {"same bits"}


def test_gradients_rounded_on_their_way_are_rounding_and_a_wrong_sum_is_not(tmp_path: Path) -> None:
    certificate, _ = prove_parity("Rounded", tmp_path / "sound")
    assert certificate.finding is None, certificate
    assert 1e-5 < float(certificate.columns[0].cells["weights"].split()[1]) < 1e-2
    certificate, _ = prove_parity("RoundedAndDetached", tmp_path / "wrong")
    assert certificate.finding is not None
    assert certificate.finding.cause == "gradient reduction"
    certificate, _ = prove_parity("Rounded", tmp_path / "exact", exact=True)
    assert certificate.finding is None, certificate
    asked = json.loads((tmp_path / "exact" / "2 ranks" / "run" / "config.json").read_text())
    assert asked["config"]["gradients"]["exchange_in"] == "same"


@pytest.mark.parametrize("task", ["Gathering", "SyncNormed"])
def test_where_samples_of_ranks_meet_the_same_ones_do(task: str, tmp_path: Path) -> None:
    certificate, _ = prove_parity(task, tmp_path)
    assert certificate.finding is None, certificate
    (attempt,) = read_attempts(tmp_path / "1 rank" / "trace")
    (other,) = read_attempts(tmp_path / "2 ranks" / "trace")
    assert [len(run.steps[1][0]["leaves"][0]["ids"]) for run in (attempt, other)] == [8, 4]
    said = "batch_size: 8 on 1 rank, 4 on 2 ranks; samples of all ranks are combined"
    assert any(line.startswith(said) for line in lines_of(certificate, None))
    assert certificate.to_json()["batch_size"] == {"1": 8, "2": 4}


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


def test_a_batch_that_keeps_its_tensors_in_slots_or_sets_is_looked_into() -> None:
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert hash_of(Slotted(zeros)) == hash_of(Slotted(torch.zeros(2))) != hash_of(Slotted(ones))
    assert hash_of({"b", "a", 3}) == hash_of({3, "a", "b"}) != hash_of({3, "a", "c"})


def test_what_is_no_number_is_not_taken_for_rounding() -> None:
    nan, inf = math.nan, math.inf
    for numbers in ([nan], [inf], [-inf]):
        assert relative(numbers, [2.5]) == relative([2.5], numbers) == inf
    assert relative([inf], [-inf]) == inf
    assert relative([nan, inf, 1.0], [nan, inf, 2.0]) == 0.5


def test_a_command_that_starts_ranks_itself_is_refused(tmp_path: Path) -> None:
    names: list[str] = []
    run_command = run_forked("Sound", tmp_path, names)
    with pytest.raises(ConfigError, match="certify started the command as 1 rank, but 2 trained"):
        certify_parity(lambda name, settings, ranks: run_command(name, settings, 2), (1, 2), 1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loop_that_leaves_no_trace_does_not_train_for_real(
    num_ranks: int, tmp_path: Path
) -> None:
    write_settings(tmp_path, **asdict(RunSettings(3)))

    def loop() -> tuple[str, bool]:
        os.environ |= attached(tmp_path, CALLBACK)
        world, task = World.enter(), TinyTask()
        model = world.replicate(torch.nn.Linear(5, 3).double())
        before = unwrap(model).weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = next(iter(Loader(task.train_data(), world, batch_size=4, epochs=1)))
        with pytest.raises(ConfigError, match="a loop around train_step alone") as refused:
            train_step(task.loss, model, optimizer, batch, world)
        return refused.value.remedy, torch.equal(before, unwrap(model).weight)

    for remedy, is_untouched in run_ranks(num_ranks, loop):
        assert "docs/own_loop.md" in remedy
        assert is_untouched


# --- The command line --------------------------------------------------------


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own, with the commands of this installation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_ranks_of_a_command_are_started_and_compared(
    apart: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["python", str(SCRIPT), "DividedByWorld"]
    code = certify("parity", words, gpus="1,2", steps=1, limit_s=90, as_json=True)
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (code, said["verdict"], said["finding"]["cause"]) == (1, "differs", "loss weighting")
    assert said["finding"]["place"] == 0
    assert "(x 0.5)" in said["finding"]["says"]
    assert said["verdicts"]["2 ranks"]["model outputs"] == "same bits"
    assert said["batch_size"] == {"1": 4, "2": 4}
    assert (Path(said["folder"]) / "2_ranks" / "output_1.txt").exists(), "kept, to look at"


def test_a_run_that_ends_before_its_kill_needs_fewer_steps(tmp_path: Path) -> None:
    """The kill follows the step after the first save, which is half-way."""
    settings = RunSettings(steps=6, kills=True)
    with pytest.raises(ConfigError, match="no training step.*\n  try: certify a command that"):
        check_killed(tmp_path, settings)
    (tmp_path / TRACE).touch()
    with pytest.raises(ConfigError, match=r"fewer than 4 steps\n  try: pass a smaller --steps"):
        check_killed(tmp_path, settings)
    (tmp_path / KILLED).touch()
    check_killed(tmp_path, settings)


def test_what_cannot_be_certified_is_one_line_and_something_to_try(apart: Path) -> None:
    def refused(error: type[Exception], match: str, *words: str, **more: Any) -> None:
        options = {"kind": "resume", "steps": 3, "limit_s": 60.0, **more}
        with pytest.raises(error, match=match):
            certify(options.pop("kind"), words, **options)

    refused(ConfigError, "there is no command\n  try: add one: lockstep certify resume -- python")
    refused(LaunchError, "nosuch cannot be started", "nosuch")
    refused(ConfigError, "the command succeeded, but no training step of lockstep was seen", "true")
    refused(ConfigError, "--steps 2 is too few", "true", steps=2)
    refused(
        ConfigError,
        "--gpus 1 leaves nothing to compare\n  try: pass --gpus 1,2",
        "true",
        kind="parity",
        gpus="1",
    )
    refused(ConfigError, "--gpus 1,two is not", "true", kind="parity", gpus="1,two")
    refused(
        LaunchError,
        r"straight: exit code 1\): ValueError: planted at <string>:1",
        "python",
        "-c",
        "raise ValueError('planted')",
    )
