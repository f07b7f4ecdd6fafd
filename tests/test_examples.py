"""The example that the guide to own loops shows is the script it says, with five lines changed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.testing import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


def in_folder(script: str, folder: Path, stop_after: int | None = None) -> None:
    """Run an example as a script, perhaps killed after so many steps."""
    os.chdir(folder)
    import lockstep.step.train_step

    steps = 0
    real = lockstep.step.train_step.train_step

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal steps
        if steps == stop_after:
            os._exit(0)
        steps += 1
        return real(*args, **kwargs)  # type: ignore[arg-type]

    lockstep.step.train_step.train_step = counted  # type: ignore[assignment]
    code = (EXAMPLES / script).read_text()
    exec(compile(code, script, "exec"), {"__name__": "__main__"})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "run").glob("step_*"))
    return load_file(newest / "model.safetensors")


def test_five_lines_are_marked_and_the_model_is_untouched() -> None:
    before = (EXAMPLES / "plain.py").read_text().splitlines()
    after = (EXAMPLES / "five_lines.py").read_text().splitlines()
    marks = [int(line.split("  # ")[1][0]) for line in after if "  # " in line]
    assert marks == [1, 2, 3, 4, 5]
    beginnings = ("inputs", "dataset", "model = nn", "optimizer")
    kept = [line for line in before if line.startswith(beginnings)]
    assert len(kept) == 4
    assert set(kept) <= set(after)


def test_the_plain_script_runs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, EXAMPLES / "plain.py"], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "model.pt").exists()


def test_the_changed_script_runs_on_any_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        run_ranks(ranks, in_folder, "five_lines.py", tmp_path / str(ranks))
        assert weights(tmp_path / str(ranks)).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("ranks_after", [2, 1])
def test_the_changed_script_goes_on_after_a_kill(tmp_path: Path, ranks_after: int) -> None:
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    run_ranks(2, in_folder, "five_lines.py", tmp_path / "straight")
    with pytest.raises(RuntimeError, match="ended without returning"):
        run_ranks(2, in_folder, "five_lines.py", tmp_path / "killed", 19)
    run_ranks(ranks_after, in_folder, "five_lines.py", tmp_path / "killed")
    for name, weight in weights(tmp_path / "straight").items():
        if ranks_after == 2:
            assert torch.equal(weights(tmp_path / "killed")[name], weight), name
        else:
            assert (weights(tmp_path / "killed")[name] - weight).abs().max() < 1e-5, name


def in_folders_of_their_own(folder: Path) -> None:
    """Run the example on a machine that shares no folder with the other."""
    own = folder / os.environ["RANK"]
    own.mkdir(exist_ok=True)
    in_folder("five_lines.py", own)


def test_ranks_that_found_different_checkpoints_do_not_train(tmp_path: Path) -> None:
    run_ranks(2, in_folders_of_their_own, tmp_path)
    with pytest.raises(RuntimeError, match="different start positions: step 40 .* step 0"):
        run_ranks(2, in_folders_of_their_own, tmp_path)


def two_networks(folder: Path, stop_after: int | None = None) -> None:
    torch.set_default_dtype(torch.float64)
    in_folder("two_networks.py", folder, stop_after)


def both_networks(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "run").glob("step_*"))
    files = {name: load_file(newest / f"{name}.safetensors") for name in ("G", "D")}
    return {f"{net}.{name}": t for net, file in files.items() for name, t in file.items()}


def test_two_networks_on_ranks_are_those_of_one_also_after_a_kill(tmp_path: Path) -> None:
    for name in ("one", "two", "killed"):
        (tmp_path / name).mkdir()
    run_ranks(1, two_networks, tmp_path / "one")
    run_ranks(2, two_networks, tmp_path / "two")
    with pytest.raises(RuntimeError, match="ended without returning"):
        run_ranks(2, two_networks, tmp_path / "killed", 11)
    run_ranks(2, two_networks, tmp_path / "killed")
    one, two, killed = (both_networks(tmp_path / name) for name in ("one", "two", "killed"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-12
    assert all(torch.equal(two[name], killed[name]) for name in two)


# --- Validation, a scheduler and an average, as docs/own_loop.md puts them into the five lines ----


def with_validation(folder: Path) -> str:
    """Write the example with the page's lines in place of its own; return its path."""
    page = (EXAMPLES.parent / "docs" / "own_loop.md").read_text()
    shown = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    kept, found, _ = (EXAMPLES / "five_lines.py").read_text().partition("store.load_into")
    assert found
    script = folder / "validated.py"
    script.write_text(kept + shown)
    return str(script)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    newest = max((folder / "run").glob("step_*"))
    files = ("model", "average", "optimizer")
    return {f"{n} {k}": v for n in files for k, v in load_file(newest / f"{n}.safetensors").items()}


def test_validation_counts_each_sample_once_and_a_resume_keeps_scheduler_and_average(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = with_validation(tmp_path)
    printed = {}
    for name, ranks, stop_after in [("one", 1, None), ("two", 2, None), ("killed", 2, 19)]:
        (tmp_path / name).mkdir()
        if stop_after:
            with pytest.raises(RuntimeError, match="ended without returning"):
                run_ranks(ranks, in_folder, script, tmp_path / name, stop_after)
        run_ranks(ranks, in_folder, script, tmp_path / name)
        out = capfd.readouterr().out
        printed[name] = re.findall(r"step (\d+): held-out loss ([\d.]+)", out)
    assert [step for step, _ in printed["two"]] == ["8", "16", "24", "32", "40"]
    assert set(printed["killed"]) == set(printed["two"])
    straight, killed = saved(tmp_path / "two"), saved(tmp_path / "killed")
    assert all(torch.equal(killed[name], tensor) for name, tensor in straight.items())

    average = saved(tmp_path / "one")
    network = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    prefix = "average module."
    network.load_state_dict({k.removeprefix(prefix): v for k, v in average.items() if prefix in k})
    torch.manual_seed(0)
    torch.randn(512, 8)
    torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)  # as the script draws
    x = torch.randn(100, 8)
    loss = (network(x) - x.sin().sum(dim=1, keepdim=True)).square().mean()
    assert float(printed["one"][-1][1]) == pytest.approx(float(loss.detach()), abs=1e-4)
