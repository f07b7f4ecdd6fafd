"""`lockstep certify resume|parity -- COMMAND`: run it several times, compare, say what came of it.

Owns: starting the command's processes, starting it again after the kill, the folder of all
that, and the table. Does not own: what a process does differently (`certify/part.py`), the
verdict (`certify/certificate.py`).
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.certify.certificate import Certificate, certify_parity, certify_resume
from lockstep.certify.part import KILLED, TRACE, Part
from lockstep.cli.rehearse import LAUNCHER_S, POLL_S, START_S, Told
from lockstep.cli.run import read_counts
from lockstep.cli.stage import reach
from lockstep.errors import ConfigError, LaunchError
from lockstep.harness.command import RunningCommand, ending_on_signals
from lockstep.plan import count_ranks
from lockstep.testing import free_port

OTHERS_S = 5.0
"""How long ranks may go on after one of them has failed."""


class Player:
    """Runs a command, part after part, each in a folder of its own."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        limit_s: float,
        tell: Callable[[str, float], None],
    ) -> None:
        self.words = list(words)
        self.folder = folder
        self.limit_s = limit_s
        self.tell = tell

    def play(self, name: str, part: Part, ranks: int) -> Path:
        """Run the command once, and again if it is killed; return the folder of its trace."""
        stage, began = self.folder / name.replace(" ", "_"), time.monotonic()
        stage.mkdir()
        part.write(stage)
        self._run(name, stage, ranks)
        if part.kills and not (stage / KILLED).exists():
            steps = "no step of lockstep's was seen in it"
            if (stage / TRACE).exists():
                steps = f"it took fewer than {part.save_at + 1} steps"
            raise ConfigError(
                f"the command ended before it could be killed: {steps}", "pass more --steps"
            )
        self.tell(name, time.monotonic() - began)
        return stage

    def _run(self, name: str, stage: Path, ranks: int) -> None:
        acts = self._start(stage, ranks)
        try:
            ended = self._follow(acts, stage, may_be_killed=True)
            if ended and (stage / KILLED).exists():
                for act in acts:
                    act.close()
                acts = self._start(stage, ranks)
                ended = self._follow(acts, stage)
            if ended:
                raise self._failure(name, acts, ended)
        finally:
            for act in acts:
                act.close()

    def _start(self, stage: Path, ranks: int) -> list[RunningCommand]:
        """Start the command as it was typed, or as so many ranks of one group."""
        env = reach(stage)
        if not ranks:
            return [RunningCommand(self.words, env, stage / "output.txt")]
        # Threads share out a sum between them: as many for every number of ranks.
        env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        port = str(free_port())
        acts = []
        for rank in range(ranks):
            group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            group |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            group |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            acts.append(RunningCommand(self.words, env | group, stage / f"output_{rank}.txt"))
        return acts

    def _follow(
        self, acts: Sequence[RunningCommand], stage: Path, may_be_killed: bool = False
    ) -> str:
        """Wait for the end; return how it ended, or nothing if it ended well.

        A launcher has time to notice the kill, and may start the ranks again by itself.
        """
        size, last = -1, time.monotonic()
        while True:
            codes = [act.code for act in acts]
            for act in acts:
                act.note_children()
            if all(code == 0 for code in codes):
                return ""
            if failed := [code for code in codes if code]:
                self._let_end(acts)
                return f"exit code {failed[0]}" if failed[0] > 0 else f"signal {-failed[0]}"
            traces = list((stage / TRACE).glob("rank_*.jsonl"))
            now = sum(path.stat().st_size for path in traces)
            if now != size:
                size, last = now, time.monotonic()
            limit_s = self.limit_s if traces else max(self.limit_s, START_S)
            if may_be_killed and (stage / KILLED).exists():
                limit_s = min(limit_s, LAUNCHER_S)
            if time.monotonic() - last > limit_s:
                return f"nothing for {limit_s:g} s"
            time.sleep(POLL_S)

    def _let_end(self, acts: Sequence[RunningCommand]) -> None:
        """Let the ranks that wait for a dead one say so, and not for long."""
        deadline = time.monotonic() + OTHERS_S
        while time.monotonic() < deadline and any(act.code is None for act in acts):
            time.sleep(POLL_S)

    def _failure(self, name: str, acts: Sequence[RunningCommand], ended: str) -> LaunchError:
        """Say why a run did not get to its end."""
        act = next((act for act in acts if act.code), acts[0])
        told, advice = Told.read(act.text), re.search(r"^\s*try: (.*)$", act.text, re.MULTILINE)
        error = re.sub(r"^lockstep\.errors\.\w+: ", "", told.error)
        where = f" at {told.place}" if told.place else ""
        return LaunchError(
            f"the command did not get through ({name}: {ended}): {error}{where}",
            f"{advice[1] if advice else 'run the command by itself'}; "
            f"all it printed is in {act.output}",
        )


@ending_on_signals()
def certify(
    kind: str,
    words: Sequence[str],
    *,
    gpus: str = "",
    steps: int,
    limit_s: float,
    exact: bool = False,
    evaluates: bool = False,
    as_json: bool = False,
) -> int:
    """Certify a command, print the certificate, and return the exit code."""
    if not words:
        raise ConfigError(
            "there is no command", f"add one: lockstep certify {kind} -- python train.py"
        )
    sizes = read_sizes(gpus) if kind == "parity" else []

    def tell(name: str, seconds: float) -> None:
        if not as_json:
            print(f"  {name:<14}{steps} steps {seconds:>7.1f} s", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="lockstep_certify_"))
    player = Player(words, folder, limit_s, tell)
    if not as_json:
        print(f"certifying {kind}: {' '.join(words)}", flush=True)
    is_kept = False
    try:
        if kind == "parity":
            certificate = certify_parity(player.play, sizes, steps, exact=exact)
        else:
            certificate = certify_resume(player.play, steps, evaluates=evaluates)
        is_kept = certificate.finding is not None
    except LaunchError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    kept = str(folder) if is_kept else None
    if as_json:
        print(json.dumps({**certificate.to_json(), "command": list(words), "folder": kept}))
    else:
        print("\n".join(lines_of(certificate, kept)), flush=True)
    return 1 if certificate.finding else 0


def read_sizes(gpus: str) -> list[int]:
    """Return the numbers of ranks to compare.

    >>> read_sizes("4,1,2")
    [1, 2, 4]
    """
    sizes = read_counts(gpus)
    if len(sizes) < 2:
        raise ConfigError(
            f"--gpus {gpus} is nothing to compare", f"pass --gpus {sizes[0]},{2 * sizes[0]}"
        )
    return sizes


def lines_of(certificate: Certificate, folder: str | None) -> list[str]:
    """Lay a certificate out as a table."""
    columns = certificate.columns
    if not columns:
        return _end_of(certificate, folder)
    rows = list(dict.fromkeys(name for column in columns for name in column.cells))
    lines = ["", "  " + f"{'':<15}{'compared':>9}  " + "  ".join(f"{c.title:<15}" for c in columns)]
    for name in rows:
        num = sum(column.compared.get(name, 0) for column in columns)
        cells = "  ".join(f"{column.cells.get(name, '-'):<15}" for column in columns)
        lines.append(f"  {name:<15}{num:>9}  {cells}")
    return [*(line.rstrip() for line in lines), *_end_of(certificate, folder)]


def _end_of(certificate: Certificate, folder: str | None) -> list[str]:
    """Return the remarks and the verdict."""
    lines = [""]
    if sizes := certificate.batch_sizes:
        each = [f"{size} on {count_ranks(num)}" for num, size in sizes.items()]
        why = "; samples of all ranks meet, so that as many met on each number of ranks"
        lines.append(f"batch_size: {', '.join(each)}{why if certificate.is_joint else ''}")
    lines += [f"remark: {remark}" for remark in certificate.remarks]
    if certificate.finding is None:
        return [*lines, f"certified: {certificate.proof}"]
    finding = certificate.finding
    lines += [f"differs first: {finding.cause}", f"  {finding.says}", f"  try: {finding.remedy}"]
    return [*lines, f"  traces and output are in {folder}"]
