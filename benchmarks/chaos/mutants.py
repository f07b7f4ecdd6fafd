"""The product broken on purpose, in the ranks of one run only; the oracles must see each.

Owns: the mutants and the short schedule they are run under. Does not own: catching them.
A mutant leaves a run that is never struck as it is wherever that is possible: what is tried
is whether chaos brings the fault to light.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chaos.schedule import Fault, Leg
from lockstep.checkpoint import layout, lock, state, store
from lockstep.data.ledger import Ledger
from lockstep.data.order import Shuffled
from lockstep.exact import reducer as exact
from lockstep.observe.events import EventLog
from lockstep.run import build as setup
from lockstep.run.average import Averages
from lockstep.run.record import Record
from lockstep.signals import StopSignals
from lockstep.step import train_step as step
from lockstep.trainer import Trainer

NUM_STEPS = 60
SCHEDULE = (
    Leg(3, (Fault("kill", "after_update", 1, 7),)),
    Leg(1, (Fault("kill", "log_flush", 0, 4),)),
    Leg(2, (Fault("flip", "after_update", 1, 7),)),
    Leg(3, (Fault("kill", "ckpt_write", 0, 3, nth=3),)),
    Leg(2, (Fault("power_loss", "after_update", 0, 8),)),
    Leg(3, (Fault("term", "forward", 2, 4),)),
    Leg(4, (Fault("kill", "backward", 0, 12),)),
)
WITH_SECOND = (Leg(2, (Fault("second", "after_update", 0, 2), Fault("kill", "forward", 1, 4))),)


@dataclass(frozen=True)
class Mutant:
    """What is broken, and how."""

    what: str
    plant: Callable[[], None]
    seen_by: str = "state"
    """The oracle that must see it; a mutant that merely crashes is none."""
    legs: tuple[Leg, ...] = SCHEDULE


def _is_last(progress: Any) -> bool:
    return int(progress.step) == NUM_STEPS


def _in_parts(change: Callable[[Any, dict[str, Any]], None]) -> None:
    """Change what every checkpoint but the last holds."""
    plain = setup.Run.parts

    def parts(run: Any) -> dict[str, Any]:
        made = plain(run)
        if not _is_last(run.progress):
            change(run, made)
        return made

    setup.Run.parts = parts  # type: ignore[method-assign]


def _on_resume(change: Callable[[Any], None]) -> None:
    """Change what a resume has restored."""
    plain = setup.Run.restore

    def restore(run: Any, checkpoint: Any) -> None:
        plain(run, checkpoint)
        change(run)

    setup.Run.restore = restore  # type: ignore[method-assign]


def no_flush() -> None:
    os.fsync = lambda descriptor: None
    os.chaos_never_flushes = True  # type: ignore[attr-defined]


def no_hash_check() -> None:
    plain = layout.check_file
    layout.check_file = lambda folder, name, size, sha256: plain(folder, name, size, None)


def save_in_mid_step() -> None:
    """Averages follow the weights only after the save."""
    plain, pending = Averages.update, []
    between = Trainer._log_evaluate_save

    def once(trainer: Any) -> None:
        if not _is_last(trainer.run.progress):
            between(trainer)
        while pending:
            plain(*pending.pop())
        if _is_last(trainer.run.progress):
            between(trainer)

    Averages.update = lambda *args: pending.append(args)  # type: ignore[method-assign,assignment]
    Trainer._log_evaluate_save = once  # type: ignore[method-assign]


def rank_keyed_noise() -> None:
    plain, rank = step.seed_everything, int(os.environ.get("RANK", "0"))
    step.seed_everything = lambda device, *key: plain(device, *key, *([rank] if rank else []))


def library_adds() -> None:
    """Sum over ranks as the communication library pleases."""

    def exchange(leaves, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        own = exact.Bucket.of(bucket)
        leaves._buckets.append(own)
        total = own.buffer.clone() if leaves._last else torch.zeros_like(own.buffer)
        for _, value in leaves._tree.nodes:
            total += own.laid_out(dict(zip(map(id, leaves._trained), value, strict=True)))
        dist.all_reduce(total)
        size = leaves.world.size
        length = -(-total.numel() // size)
        padded = nn.functional.pad(total, (0, length * size - total.numel()))
        own.piece = padded.view(size, length)[leaves.world.rank].clone()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(own.buffer)
        return future

    exact.ExactReducer.exchange = exchange  # type: ignore[method-assign]


def fetched_is_consumed() -> None:
    def ahead(run: Any, parts: dict[str, Any]) -> None:
        parts["progress"]["consumed"] += run.contract.plan.global_batch

    _in_parts(ahead)


def ledger_forgotten() -> None:
    _on_resume(lambda run: setattr(run.progress, "ledger", Ledger()))


def optimizer_not_saved() -> None:
    _in_parts(lambda run, parts: parts["optimizer"].update(state={}))


def averages_not_restored() -> None:
    Averages.load_state = lambda *args: None  # type: ignore[method-assign,assignment]


def rate_by_the_clock() -> None:
    plain, began = setup.Run.set_rate, time.monotonic()

    def set_rate(run: Any, factor: float) -> None:
        plain(run, factor * (1 - 1e-4 * (time.monotonic() - began)))

    setup.Run.set_rate = set_rate  # type: ignore[method-assign]


def noise_runs_on() -> None:
    """Seed at the first leaf of a rank only."""
    plain, seen = step.seed_everything, set()

    def seed(device: Any, *key: Any) -> None:
        if key[-2] not in seen:
            seen.add(key[-2])
            plain(device, *key)

    step.seed_everything = seed


def order_of_the_process() -> None:
    """Count epochs from the start of the process."""
    plain, first = Shuffled.ids, []

    def ids(order: Any, epoch: int, start: int, stop: int) -> Any:
        first.append(epoch)
        return plain(order, epoch - first[0], start, stop)

    Shuffled.ids = ids  # type: ignore[method-assign]


def borrowed_counted() -> None:
    def enter(record: Any, batch: Any) -> None:
        for micro_batch in batch.micro_batches:
            record.local_ledger.add(batch.epoch, micro_batch.visited)

    Record.enter = enter  # type: ignore[method-assign]


def ranks_in_turn() -> None:
    """Add up leaf by leaf, then rank by rank."""

    def add(tree: Any, node: Any, value: Any) -> None:
        if tree.nodes:
            for mine, other in zip(tree.nodes[0][1], value, strict=True):
                mine.add_(other)
        else:
            tree.nodes.append((node, value))

    exact.TreeSum.add = add  # type: ignore[method-assign]


def statistics_of_a_rank() -> None:
    plain = exact.Statistics.finish

    class Alone:
        rank, size = 0, 1

        @staticmethod
        def all_parts(local: Any, lengths: Any) -> list[Any]:
            return [local]

    exact.Statistics.finish = (  # type: ignore[method-assign]
        lambda seen, num_leaves, world: plain(seen, num_leaves, Alone())  # type: ignore[arg-type]
    )


def oldest_taken() -> None:
    def latest(found: Any, *_: Any) -> Any:
        steps = found.steps()
        return (store.read_checkpoint(found.path(steps[0])) if steps else None), []

    store.CheckpointStore.latest = latest  # type: ignore[method-assign]


def newest_removed() -> None:
    import shutil

    plain = store.CheckpointStore._prune

    def prune(kept: Any, just_saved: Any) -> None:
        plain(kept, just_saved)
        number = int(just_saved.name.split("_")[1])
        if number < NUM_STEPS and len(kept.steps()) > 1:
            shutil.rmtree(just_saved)

    store.CheckpointStore._prune = prune  # type: ignore[method-assign]


def log_not_rewound() -> None:
    plain = EventLog.write

    def write(log: Any, kind: str, *args: Any, **fields: Any) -> Any:
        return {} if kind in ("resume", "run_start") else plain(log, kind, *args, **fields)

    EventLog.write = write  # type: ignore[method-assign]


def log_held_back() -> None:
    """Write fifty lines at a time."""
    plain, plain_close, held = EventLog._append, EventLog.close, []

    def append(log: Any, text: str) -> None:
        held.append((log, text))
        if len(held) == 50:
            flush()

    def flush() -> None:
        while held:
            plain(*held.pop(0))

    def close(log: Any) -> None:
        flush()
        plain_close(log)

    EventLog._append, EventLog.close = append, close  # type: ignore[method-assign]


def sums_forgotten() -> None:
    _on_resume(lambda run: run.progress.interval.clear())


def scaled_by_ranks() -> None:
    plain = exact.ExactReducer.finish

    def finish(leaves: Any) -> None:
        plain(leaves)
        for parameter in leaves._trained:
            parameter.grad *= leaves.world.size

    exact.ExactReducer.finish = finish  # type: ignore[method-assign]


def momentum_forgotten() -> None:
    def forget(run: Any) -> None:
        for kept in run.optimizer.state.values():
            kept["exp_avg"].zero_()

    _on_resume(forget)


def published_early() -> None:
    """Write into the folder that a resume reads."""

    def save(kept: Any, number: int, parts: Any, meta: Any) -> Any:
        final = kept.path(number)
        if kept._is_saved(final):
            return final
        final.mkdir(parents=True)
        share = state.share_of(parts)
        written = layout.Written(share.skeletons, layout.write_share(final, share))
        layout.write_manifest(final, number, kept.recipe, written, meta)
        kept._prune(final)
        return final

    store.CheckpointStore.save = save  # type: ignore[method-assign]


def saved_while_it_moves() -> None:
    """Hand the writer the live weights, moved once more before they are on disk."""

    def nudge(run: Any, parts: dict[str, Any]) -> None:
        moved = {name: value.clone() for name, value in parts["model"].items()}
        moved["head.2.bias"] -= run.optimizer.param_groups[0]["lr"]
        parts["model"] = moved

    _in_parts(nudge)


def deaf_to_signals() -> None:
    StopSignals.exit_code = property(lambda signals: 0)  # type: ignore[method-assign,assignment]


def no_lock() -> None:
    lock.FolderLock._lock = lambda folder: None  # type: ignore[method-assign,assignment]


def seed_of_the_process() -> None:
    """Let the noise of samples and losses depend on how many steps this process has done."""
    plain, calls = step.Context.generator, []

    def generator(context: Any, stream: str) -> Any:
        made = plain(context, stream)
        calls.append(context.step)
        return made.manual_seed(made.initial_seed() ^ (context.step - calls[0]))

    step.Context.generator = generator  # type: ignore[method-assign]


MUTANTS = {
    "no_flush": Mutant("a save is not flushed to the disk", no_flush, "redone"),
    "no_hash_check": Mutant("hashes are not compared", no_hash_check),
    "save_in_mid_step": Mutant("saved before the averages follow", save_in_mid_step),
    "saved_while_it_moves": Mutant("saved while the next step moves it", saved_while_it_moves),
    "rank_keyed_noise": Mutant("dropout is keyed by rank", rank_keyed_noise),
    "noise_runs_on": Mutant("dropout is not seeded for each leaf", noise_runs_on),
    "seed_of_the_process": Mutant("noise counts steps of the process", seed_of_the_process),
    "library_adds": Mutant("a plain all-reduce in place of the tree", library_adds),
    "ranks_in_turn": Mutant("summed in the order of ranks", ranks_in_turn),
    "scaled_by_ranks": Mutant("the gradient is scaled by the number of ranks", scaled_by_ranks),
    "statistics_of_a_rank": Mutant("batch statistics stay a rank's own", statistics_of_a_rank),
    "fetched_is_consumed": Mutant("prefetched samples count as consumed", fetched_is_consumed),
    "ledger_forgotten": Mutant("the ledger is not restored", ledger_forgotten, "ledger"),
    "borrowed_counted": Mutant("a borrowed leaf counts in the ledger", borrowed_counted, "ledger"),
    "order_of_the_process": Mutant("the order counts epochs anew", order_of_the_process),
    "optimizer_not_saved": Mutant("the optimizer is not saved", optimizer_not_saved),
    "momentum_forgotten": Mutant("momentum is zero after a resume", momentum_forgotten),
    "averages_not_restored": Mutant("averages are not restored", averages_not_restored),
    "rate_by_the_clock": Mutant("the rate follows the clock", rate_by_the_clock),
    "oldest_taken": Mutant("the oldest checkpoint is taken", oldest_taken, "redone"),
    "newest_removed": Mutant("the newest checkpoint is removed", newest_removed, "redone"),
    "published_early": Mutant(
        "a checkpoint is in place before it is whole", published_early, "checkpoints"
    ),
    "log_not_rewound": Mutant("the log does not say where a run went on", log_not_rewound, "log"),
    "log_held_back": Mutant("log lines wait in memory", log_held_back, "log"),
    "sums_forgotten": Mutant("sums since the last log line are lost", sums_forgotten, "log"),
    "deaf_to_signals": Mutant("SIGTERM is not heard", deaf_to_signals, "exit_codes"),
    "no_lock": Mutant("a second run gets the folder too", no_lock, "one_writer", WITH_SECOND),
}
