"""Does a run that is struck two hundred times end with the bits of one that never was?

    python benchmarks/chaos.py [--seed 0] [--kills 200] [--steps 3000] [--ranks 4] [--json FILE]
    python benchmarks/chaos.py --pairs 1 [--json FILE]
    python benchmarks/chaos.py --mutants [--only NAME ...] [--json FILE]
    python benchmarks/chaos.py --replay SCHEDULE

Trains a small model in exact mode under a seeded schedule of real faults, the number of ranks
drawn anew after each, and compares all it leaves with an uninterrupted run of one process. On
failure the schedule is halved until it is minimal. `--pairs N` has every fault strike N times at
every point where it can, and fails if one did not. `--mutants` breaks the product on purpose
and says which oracle saw it. Exit code 1 if anything did not hold.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from chaos.drive import Launcher, Story
from chaos.oracles import Verdict
from chaos.schedule import FAULTS, POINTS, Leg

from chaos import drive, oracles, schedule

CERTAINTY = 0.05


def failure_bound(num_passed: int) -> float:
    """Return the failure rate that so many passes rule out at 95 %.

    >>> round(failure_bound(200), 4)
    0.0149
    """
    return float(1 - CERTAINTY ** (1 / num_passed)) if num_passed else 1.0


def coverage(stories: Sequence[Story]) -> Counter[tuple[str, str]]:
    """Count how often each fault struck at each point."""
    struck = [story.fault(told) for story in stories for told in story.told("struck")]
    return Counter((fault.point or "time", fault.kind) for fault in struck)


def print_coverage(hits: Counter[tuple[str, str]]) -> list[str]:
    """Print point x fault; return the pairs that could have been hit and were not."""
    print(f"\n{'point':<14}" + "".join(f"{kind[:9]:>10}" for kind in FAULTS))
    possible = set(schedule.valid_pairs())
    for point in (*POINTS, "time"):
        cells = [(hits[point, kind], (point, kind) in possible) for kind in FAULTS]
        shown = "".join(f"{count or ('.' if can else ''):>10}" for count, can in cells)
        print(f"{point:<14}{shown}")
    missed = {
        p: [kind for point, kind in sorted(possible) if point == p and not hits[p, kind]]
        for p in POINTS
    }
    num_missed = sum(map(len, missed.values()))
    print(f"{len(possible) - num_missed} of {len(possible)} pairs were hit; the others:")
    for point, kinds in missed.items():
        if kinds:
            print(f"  {point:<12}{', '.join(kinds)}")
    return [f"{kind} at {point}" for point, kinds in missed.items() for kind in kinds]


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        print(f"{'held' if verdict.held else 'BROKEN':<8}{verdict.name:<14}{verdict.seen}")


def print_figures(found: dict[str, Any]) -> None:
    kills, goodput = found["kills"], found["goodput"]
    print(f"\nfaults struck {found['faults']}, of them kills {kills}; launches {found['launches']}")
    print(f"struck again before the first step: {found['overtaken']}, counted from the last fault")
    each = found["redone"] / max(1, kills)
    print(f"steps done again {found['redone']}, {each:.2f} a kill, at most {found['redone_most']}")
    print(f"{'to the next step, in s':<26}{'count':>7}{'median':>9}{'p95':>9}{'p99':>9}{'max':>9}")
    rows = {"all, launcher alive": found["recovery_warm_s"], **found["recovery_s"]}
    rows |= {f"of it, {name}": times for name, times in found["stages_s"].items()}
    for name, times in rows.items():
        if times["count"]:
            numbers = "".join(f"{times[key]:>9.3f}" for key in ("median", "p95", "p99", "max"))
            print(f"  {name:<24}{times['count']:>7}{numbers}")
    shares = ", ".join(f"{name} {share:.1%}" for name, share in goodput.items())
    print(f"wall time {found['seconds']:.1f} s: {shares}")


def shrink(legs: Sequence[Leg], fails: Callable[[Sequence[Leg]], bool]) -> list[Leg]:
    """Return a schedule that still fails, and does not with any one of its launches left out."""
    legs, parts = list(legs), 2
    while len(legs) > 1:
        size = -(-len(legs) // parts)
        cuts = [legs[start : start + size] for start in range(0, len(legs), size)]
        rests = [[leg for cut in cuts if cut is not out for leg in cut] for out in cuts]
        smaller = next(
            (some for some in (*cuts, *rests) if 0 < len(some) < len(legs) and fails(some)), None
        )
        if smaller is not None:
            print(f"still fails with {len(smaller)} launches", flush=True)
            legs, parts = smaller, 2
        elif size == 1:
            break
        else:
            parts = min(len(legs), 2 * parts)
    return legs


def run_schedule(
    args: argparse.Namespace, folder: Path, launcher: Launcher
) -> tuple[bool, dict[str, Any]]:
    """Run a drawn or replayed schedule, judge it, and shrink it if it failed."""
    if args.replay:
        legs = schedule.read(args.replay)
    else:
        num_legs = args.pairs * len(schedule.valid_pairs()) or args.kills
        legs = schedule.draw(
            args.seed, num_legs, args.steps, args.ranks, all_at_points=args.pairs > 0
        )
    golden_s = drive.golden(folder / "golden", args.steps)

    def struck(some: Sequence[Leg]) -> tuple[Story, list[Verdict]]:
        story = drive.run(folder / "run", some, args.steps, launcher, args.plant)
        return story, oracles.judge(story, folder / "golden")

    story, verdicts = struck(legs)
    found = oracles.figures(story)
    print(
        f"seed {args.seed}: {args.steps} steps, {len(legs)} launches drawn, 1 to {args.ranks} ranks"
    )
    print_verdicts(verdicts)
    print_figures(found)
    print(f"the same run in one process, no fault: {golden_s:.1f} s, start included")
    missed = print_coverage(coverage([story]))
    well = all(verdict.held for verdict in verdicts)
    if well and args.pairs and missed:
        print(f"\n{len(missed)} pairs of point and fault were never hit")
        well = False
    elif well:
        kills, bound = found["kills"], failure_bound(found["kills"])
        print(f"\n{kills} of {kills} kills survived: fewer than {bound:.1%} fail, at 95%")
    else:
        print(f"\nBROKEN; what the run said: {folder / 'launcher' / 'said.txt'}")
        if not args.no_shrink:
            small = shrink(legs, lambda some: not all(v.held for v in struck(some)[1]))
            path = Path(f"chaos_seed_{args.seed}.json")
            schedule.write(small, path)
            for leg in small:
                print(f"  {leg.size} ranks: {', '.join(map(str, leg.faults))}")
            planted = f" --plant {args.plant}" if args.plant else ""
            steps = f"--steps {args.steps}{planted}"
            print(f"replay: python benchmarks/chaos.py {steps} --replay {path}")
    facts = {v.name: {"held": v.held, "seen": v.seen} for v in verdicts}
    return well, {
        "seed": args.seed,
        "oracles": facts,
        **found,
        "unhit": missed,
        "golden_s": golden_s,
    }


def run_mutants(
    only: Sequence[str], folder: Path, launcher: Launcher
) -> tuple[bool, dict[str, Any]]:
    """Run every mutant, and the sound product first; each mutant must be seen, it must not."""
    from chaos.mutants import MUTANTS, NUM_STEPS, SCHEDULE, WITH_SECOND

    golden = folder / "golden"
    drive.golden(golden, NUM_STEPS)
    found: dict[str, Any] = {}
    for name in only or ("", *MUTANTS):
        began = time.monotonic()
        rounds = [SCHEDULE, WITH_SECOND] if not name else [MUTANTS[name].legs]
        stories = [
            drive.run(folder / "run", legs, NUM_STEPS, launcher, name, 300) for legs in rounds
        ]
        seen = [v for s in stories for v in oracles.judge(s, golden) if not v.held]
        names = [verdict.name for verdict in seen]
        what = MUTANTS[name].what if name else "the product as it is"
        took_steps = all((story.folder / "chaos" / "steps.txt").exists() for story in stories)
        is_right = took_steps and (MUTANTS[name].seen_by in names if name else not names)
        verdict = ("caught" if name else "clean") if is_right else "NOT RIGHT"
        print(
            f"{verdict:<10}{what:<50}{time.monotonic() - began:6.1f} s  {', '.join(names)}",
            flush=True,
        )
        if not is_right:
            print_verdicts(seen)
        seconds = time.monotonic() - began
        found[name or "none"] = {"right": is_right, "seen_by": names, "seconds": seconds}
    right = [facts["right"] for facts in found.values()]
    print(f"{sum(right)} of {len(right)} as it should be")
    return all(right), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=0, help="every fault at every point, N times")
    parser.add_argument("--replay", type=Path, help="a schedule that was written down")
    parser.add_argument("--no_shrink", action="store_true")
    parser.add_argument("--plant", default="", help="a mutant, to see the rig fail and shrink")
    parser.add_argument("--mutants", action="store_true")
    parser.add_argument("--only", nargs="*", default=(), help="names of mutants")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, kept")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        with Launcher(folder / "launcher") as launcher:
            if args.mutants:
                well, found = run_mutants(args.only, folder, launcher)
            else:
                well, found = run_schedule(args, folder, launcher)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
