"""What must hold after a run under chaos, and the figures of it.

Owns: every verdict, each from files and notes, none from the run's own word that it went well.
Does not own: making anything happen.
"""

import hashlib
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from chaos.drive import Story
from chaos.schedule import ASKED, CODES, RESTARTED, SURVIVED
from chaos.train import EVERY, SAMPLES
from lockstep import CheckpointStore, LockstepError, read_events
from lockstep.checkpoint import FolderLock
from lockstep.data.order import Shuffled

TIMES = {
    "time",
    "samples_per_second",
    "step_time_s",
    "data_wait_share",
    "data_wait_rank",
    "slow_rank",
    "slow_ratio",
    "local_step_time_s",
    "local_data_wait_share",
    "local_stall_s",
    "stall_s",
}
MOST_NAMED = 2
"""So many names of shared memory may be left in a run; a leak would leave one for every kill."""
MARKS = ("launch", "began", "goes_on", "struck", "left")
SAME_IN_ALL = ("step", "epoch", "evaluation")
"""A stop that was asked for saves, and says so; the training itself reads the same."""


@dataclass(frozen=True)
class Verdict:
    """Whether one thing held, and what was seen."""

    name: str
    held: bool
    seen: str


def judge(story: Story, golden: Path) -> list[Verdict]:
    """Apply every oracle."""
    oracles = (state, ledger, log, redone, one_writer, litter, checkpoints, exit_codes)
    verdicts = []
    for oracle in oracles:
        try:
            held, seen = oracle(story, golden)
        except (OSError, LockstepError, LookupError, ValueError) as error:
            held, seen = False, f"{type(error).__name__}: {error}"
        verdicts.append(Verdict(oracle.__name__, held, seen))
    return verdicts


def state_of(folder: Path) -> dict[str, str]:
    """Hash each part of the last checkpoint: its tensors and the plain values around them."""
    newest = sorted((folder / "checkpoints").glob("step_*"))[-1]
    skeletons = json.loads((newest / "manifest.json").read_text())["skeletons"]
    hashes = {"": newest.name}
    for part, skeleton in skeletons.items():
        digest = hashlib.sha256(json.dumps(skeleton).encode())
        for name, tensor in sorted(tensors_of(newest, part).items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        hashes[part] = digest.hexdigest()
    return hashes


def tensors_of(checkpoint: Path, part: str) -> dict[str, Tensor]:
    """Read a part by hand, from one file or from the shares of several ranks."""
    rows: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for path in [*checkpoint.glob(f"{part}.safetensors"), *checkpoint.glob(f"{part}.*_of_*")]:
        with safe_open(path, framework="pt") as file:
            cuts = json.loads(file.metadata().get("cuts", "{}"))
            for name in file.keys():  # noqa: SIM118
                rows[name].append((cuts.get(name, [0])[0], file.get_tensor(name)))
    ordered = {name: sorted(pieces, key=lambda piece: piece[0]) for name, pieces in rows.items()}
    return {
        name: torch.cat([tensor for _, tensor in pieces]) if len(pieces) > 1 else pieces[0][1]
        for name, pieces in ordered.items()
    }


def state(story: Story, golden: Path) -> tuple[bool, str]:
    """Weights, optimizer, averages and progress end as in the run without a fault."""
    wanted, found = state_of(golden), state_of(story.folder)
    differing = sorted(p or "step" for p in wanted | found if wanted.get(p) != found.get(p))
    return not differing, f"differs: {', '.join(differing)}" if differing else found["model"][:16]


def ledger(story: Story, golden: Path) -> tuple[bool, str]:
    """Every epoch says "each once", and what ranks wrote down of each step says so too."""
    epochs = [e for e in read_events(story.folder) if e["event"] == "epoch"]
    wanted = sum(e["event"] == "epoch" for e in read_events(golden))
    broken = [e["epoch"] for e in epochs if not e["each_once"]]
    last: dict[int, str] = {}
    taken: dict[tuple[int, str], list[int]] = defaultdict(list)
    epoch_of: dict[int, int] = {}
    for _, _, leg, _, _, step, epoch, *ids in story.steps:
        last[int(step)], epoch_of[int(step)] = leg, int(epoch)
        taken[int(step), leg] += [int(sample) for sample in ids[0].split(",")] if ids else []
    seen: dict[int, list[int]] = defaultdict(list)
    for step, leg in last.items():
        seen[epoch_of[step]] += taken[step, leg]
    for epoch, ids in seen.items():
        wanted_ids = Shuffled(SAMPLES, 0).ids(epoch, 0, min(len(ids), SAMPLES)).tolist()
        if sorted(ids) != sorted(wanted_ids) or (epoch < wanted and len(ids) != SAMPLES):
            broken.append(epoch + 1)
    said = f"{len(epochs)} epochs, each sample once"
    if broken or len(epochs) != wanted:
        said = f"{len(epochs)} of {wanted} epochs; not each once: {sorted(set(broken))[:8]}"
    return not broken and len(epochs) == wanted, said


def record(folder: Path) -> list[str]:
    """Return the lines of the event log that must not depend on what happened."""
    return [
        json.dumps({key: value for key, value in event.items() if key not in TIMES})
        for event in read_events(folder)
        if event["event"] in SAME_IN_ALL
    ]


def log(story: Story, golden: Path) -> tuple[bool, str]:
    """The event log reads as if nothing had happened, times aside."""
    wanted, found = record(golden), record(story.folder)
    if wanted == found:
        return True, f"{len(found)} lines, byte for byte"
    pairs = enumerate(zip(wanted, found, strict=False))
    line = next((n for n, (a, b) in pairs if a != b), min(len(wanted), len(found)))
    return False, f"{len(found)} of {len(wanted)} lines, the first to differ is {line + 1}"


@dataclass(frozen=True)
class Switch:
    """One group of ranks taking over from another."""

    redone: int
    leg: int
    num_damaged: int
    """Checkpoints damaged by the rig since the other group's first step."""
    was_behind: bool
    """Whether the other group saved in the background: its newest may not have been there yet."""


def switches(story: Story) -> list[Switch]:
    """Return what each takeover cost, from the steps that first ranks wrote down."""
    damaged = [told["time"] for told in story.told("damaged")]
    found: list[Switch] = []
    since, before = 0.0, ("", 0)
    for time, _, leg, rank, _, step, *_ in story.steps:
        if rank != "0":
            continue
        if before[0] != leg:
            if before[0]:
                num = sum(since < when < float(time) for when in damaged)
                again = before[1] - (int(step) - 1)
                old, new = int(before[0].split(".")[0]), int(leg.split(".")[0])
                was_behind = old < len(story.legs) and story.legs[old].background
                found.append(Switch(again, new, num, was_behind))
            since = float(time)
        before = (leg, int(step))
    return found


def redone(story: Story, golden: Path) -> tuple[bool, str]:
    """A fault costs no more steps than lie between two checkpoints.

    A damaged one costs as many more, and so does one that was still being written.
    """
    found = switches(story)
    late = [s for s in found if not 0 <= s.redone <= EVERY * (1 + s.num_damaged + s.was_behind)]
    said = f"{sum(s.redone for s in found)} in all"
    if late:
        said += ": " + ", ".join(f"{s.redone} before leg {s.leg}" for s in late[:5])
    return not late, said


def one_writer(story: Story, golden: Path) -> tuple[bool, str]:
    """No two groups of ranks ever trained in turns: a folder belongs to one run at a time."""
    groups: list[str] = []
    for _, pid, _, rank, *_ in story.steps:
        if rank == "0" and groups[-1:] != [pid]:
            groups.append(pid)
    twice = sorted({pid for pid in groups if groups.count(pid) > 1})
    return not twice, f"taken turns: {', '.join(twice[:4])}" if twice else f"{len(groups)} groups"


def litter(story: Story, golden: Path) -> tuple[bool, str]:
    """No process, lock, shared memory or half-written file is left.

    A process killed between torch's two calls that open shared memory and take its name away
    leaves the name; nobody but the kernel could help it, so it is counted, and removed.
    """
    left = list(story.left_behind)
    left += [str(p.name) for p in (story.folder / "checkpoints").glob(".*")]
    pids = {str(told["pid"]) for told in story.notes}
    shared = [
        path
        for path in Path("/dev/shm").iterdir()
        if pids & set(path.name.split("_")) and path.stat().st_mtime >= story.notes[0]["time"]
    ]
    named = [p for p in shared if p.name.startswith("torch_")]
    for path in named:
        path.unlink()
    left += [p.name for p in shared if p not in named]
    if (story.folder / "lock").read_text():
        left.append("a name in the lock")
    with FolderLock(story.folder):
        pass
    if story.timed_out:
        left.append("a run that did not end")
    rest = f"nothing but {len(named)} names of torch's in /dev/shm" if named else "nothing"
    return not left and len(named) <= MOST_NAMED, ", ".join(left[:5]) or rest


def checkpoints(story: Story, golden: Path) -> tuple[bool, str]:
    """Every checkpoint is whole, and none was ever found damaged but by the rig's own hand."""
    store = CheckpointStore(story.folder / "checkpoints", recipe="chaos")
    ours: set[str] = set()
    bad = []
    for told in story.notes:
        if told["kind"] == "damaged":
            ours.add(told["path"])
        elif told["kind"] == "goes_on":  # what it passed over is set aside by now
            bad += [f"{name}: {why[-60:]}" for name, why in told["rejected"] if name not in ours]
            ours -= {name for name, _ in told["rejected"]}
    for step in store.steps():
        try:
            store.verify(store.path(step))
        except LockstepError as error:
            if store.path(step).name not in ours:
                bad.append(str(error).splitlines()[0][-80:])
    whole = len(store.steps())
    return not bad and whole > 0, "; ".join(bad[:3]) or f"{whole} kept, all whole"


def exit_codes(story: Story, golden: Path) -> tuple[bool, str]:
    """Every launch ended with the documented code of what was done to it, the last one with 0."""
    struck = defaultdict(list)
    for told in story.told("struck"):
        struck[told["leg"]].append((story.fault(told).kind, told["step"]))
    wrong = []
    left = story.told("left")
    for told in left:
        here = [(kind, step) for kind, step in struck[told["leg"]] if kind in CODES]
        expected = {CODES[kind] for kind, _ in here}
        is_drawn = told["leg"] < len(story.legs)
        restarts = story.legs[told["leg"]].restarts if is_drawn else 0
        if restarts or all(step >= story.num_steps - 2 for _, step in here):
            expected.add(0)  # struck too late to matter, or started again by the launcher
        if told["code"] not in expected:
            kinds = " and ".join(kind for kind, _ in here) or "nothing"
            wrong.append(f"{told['code']} after {kinds} (leg {told['leg']})")
    seconds = [told["code"] for told in story.told("second_left")]
    wrong += [f"{code} from a second run" for code in seconds if code != 2]
    if not left or left[-1]["code"] != 0:
        wrong.append("the run did not finish")
    return not wrong, "; ".join(wrong[:5]) or f"{len(left)} launches"


# --- Figures ----------------------------------------------------------------------------------


def figures(story: Story) -> dict[str, Any]:
    """Return the numbers of a run: faults, steps done again, recovery, goodput."""
    began = {told["pid"]: told["time"] for told in story.told("began")}
    beats = [(float(w[0]), began.get(int(w[1]), 0.0)) for w in story.steps if w[3] == "0"]
    recovery: dict[str, list[float]] = {"rank": [], "asked": [], "launcher": [], "save": []}
    lethal = [t for t in story.told("struck") if story.fault(t).kind not in SURVIVED]
    num_overtaken = 0
    for told in lethal:
        kind = story.fault(told).kind
        after = [when for when, birth in beats if when > told["time"] and birth > told["time"]]
        if after and any(told["time"] < other["time"] < after[0] for other in lethal):
            num_overtaken += 1  # struck again before it had recovered: the last one is counted
        elif after:
            group = "rank" if kind in RESTARTED else "asked" if kind in ASKED else "save"
            recovery["launcher" if kind == "launcher" else group].append(after[0] - told["time"])
    warm = [s for kind, times in recovery.items() if kind != "launcher" for s in times]
    again = [switch.redone for switch in switches(story)]
    return {
        "faults": len(story.told("struck")),
        "kills": len(lethal),
        "launches": len(story.told("launch")),
        "redone": sum(again),
        "redone_most": max(again, default=0),
        "overtaken": num_overtaken,
        "recovery_s": {kind: spread(times) for kind, times in recovery.items()},
        "recovery_warm_s": spread(warm),
        "stages_s": {name: spread(times) for name, times in stages(story).items()},
        "seconds": story.seconds,
        "goodput": goodput(story),
    }


def stages(story: Story) -> dict[str, list[float]]:
    """Return what a recovery consists of, launch by launch."""
    found: dict[str, list[float]] = {"end": [], "fork": [], "restore": [], "first step": []}
    first: dict[tuple[str, int], float] = {}
    for told in story.notes:
        if told["kind"] == "struck" and story.fault(told).kind not in SURVIVED:
            first["struck", told["leg"]] = told["time"]  # the last counts
        elif "leg" in told:
            first.setdefault((told["kind"], told["leg"]), told["time"])
    for words in story.steps:
        first.setdefault(("step", int(words[2].split(".")[0])), float(words[0]))
    pairs = {
        "end": ("struck", "left"),
        "fork": ("launch", "began"),
        "restore": ("began", "goes_on"),
        "first step": ("goes_on", "step"),
    }
    for name, (start, stop) in pairs.items():
        for leg in range(len(story.legs)):
            if (start, leg) in first and first.get((stop, leg), 0.0) > first[start, leg]:
                found[name].append(first[stop, leg] - first[start, leg])
    return found


def spread(times: list[float]) -> dict[str, float]:
    """Return the number of times, and their median, upper percentiles and largest."""
    if not times:
        return {"count": 0}
    ordered = sorted(times)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)

    middle = round(statistics.median(ordered), 4)
    return {"count": len(ordered), "median": middle, "p95": at(0.95), "p99": at(0.99), "max": at(1)}


PHASES = {
    ("launch", "began"): "fork",
    ("began", "goes_on"): "restore",
    ("goes_on", "step"): "first step",
    ("step", "struck"): "cut short",
    ("struck", "left"): "end",
}


def goodput(story: Story) -> dict[str, float]:
    """Return the shares of the wall time: steps that counted, and what the rest went into."""
    marks = [(told["time"], told["kind"], "", 0) for told in story.notes if told["kind"] in MARKS]
    marks += [(float(w[0]), "step", w[2], int(w[5])) for w in story.steps if w[3] == "0"]
    marks.sort()
    last = {step: leg for _, kind, leg, step in marks if kind == "step"}
    spent: dict[str, float] = dict.fromkeys(("good", "redone", *PHASES.values(), "other"), 0.0)
    for (t0, before, _, _), (t1, after, leg, step) in zip(marks, marks[1:], strict=False):
        phase = PHASES.get((before, after), "other")
        if before == after == "step":
            phase = "good" if last[step] == leg else "redone"
        spent[phase] += t1 - t0
    spent["other"] += story.seconds - sum(spent.values())
    return {name: round(value / story.seconds, 4) for name, value in spent.items()}
