"""Checks of the machine itself: GPUs, versions that must agree, shared memory, limits.

Owns: querying NVML and the kernel, and judging what would stop or slow a run. Every check is a
function of its arguments, and returns a `Result`.
"""

import importlib
import os
import platform
import re
import resource
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.doctor.findings import Findings
from lockstep.doctor.report import Result, bytes_text, fail, ok, skip, warn

DISTRIBUTION = "lockstep-train"
BUSY_SHARE = 0.05
"""A GPU with a larger share of its memory in use is not idle, whoever uses it."""
FILES_EACH_RANK = 128
"""Open files of a rank without workers: libraries, sockets, logs (measured: 40 to 90)."""
SMALL_SHM_BYTES = 2**30
LOW_FILES = 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as reported by the driver."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    pids: tuple[int, ...]
    ecc_errors: int | None = None
    """Uncorrected errors since the driver was loaded; None if unknown."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The machine as reported by NVML, or the `problem` that kept NVML from answering."""

    gpus: tuple[Gpu, ...] = ()
    version: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA version that the driver supports."""
    problem: str = ""


def read_driver(library: Any = None) -> Driver:
    """Ask NVML for all GPUs; a missing library or driver becomes a `problem`."""
    try:
        nvml = library or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # an ImportError, or NVML's error for a missing driver
        return Driver(problem=f"no NVIDIA driver ({str(error) or type(error).__name__})")
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        version = _text(nvml.nvmlSystemGetDriverVersion())
        return Driver(gpus, version, (number // 1000, number % 1000 // 10))
    except Exception as error:
        return Driver(problem=f"the NVIDIA driver does not answer ({error})")
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    pids: tuple[int, ...] = ()
    ecc = None
    with suppress(Exception):  # not reported by every card, nor in every container
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        pids = tuple(p.pid for p in processes if p.pid != os.getpid())
    with suppress(Exception):
        ecc = int(nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0))
    uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(index, uuid, name, int(memory.total), int(memory.used), pids, ecc)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_gpus(driver: Driver, env: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that a process would see, in order; an unknown one ends the list, as in CUDA.

    >>> two = Driver((Gpu(0, "GPU-a", "", 1, 0, ()), Gpu(1, "GPU-b", "", 1, 0, ())))
    >>> [gpu.index for gpu in visible_gpus(two, {"CUDA_VISIBLE_DEVICES": "1,0,7"})]
    [1, 0]
    """
    wanted = env.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(driver.gpus)
    seen: list[Gpu] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        found = [g for g in driver.gpus if str(g.index) == word or g.uuid.startswith(word)]
        if not found:
            break
        seen.append(found[0])
    return seen


def gpus(driver: Driver, env: Mapping[str, str], num_processes: int = 0) -> Result:
    """Check that the GPUs that the job asks for exist."""
    if driver.problem:
        return skip(f"{driver.problem}: runs use the CPU, with gloo")
    seen, wanted = visible_gpus(driver, env), env.get("CUDA_VISIBLE_DEVICES")
    asked = [word for word in (wanted or "").split(",") if word.strip()]
    if asked and asked[0] != "-1" and len(seen) < len(asked):  # -1 hides all GPUs
        return fail(
            f"CUDA_VISIBLE_DEVICES={wanted} names GPUs that are not there: {len(driver.gpus)} are",
            f"set CUDA_VISIBLE_DEVICES={','.join(str(g.index) for g in driver.gpus)}",
        )
    if not seen:
        why = f"CUDA_VISIBLE_DEVICES={wanted!r} hides all {len(driver.gpus)}"
        return warn(f"{why}: runs use the CPU", "unset CUDA_VISIBLE_DEVICES")
    kinds = ", ".join(sorted({gpu.name for gpu in seen}))
    listed = f"{len(seen)} x {kinds}, {bytes_text(seen[0].total_bytes)} each"
    if num_processes > len(seen):
        return warn(
            f"{num_processes} processes share {listed}: gloo through host memory, not NCCL",
            f"start {len(seen)} processes",
        )
    errors = {gpu.index: gpu.ecc_errors for gpu in seen if gpu.ecc_errors}
    if errors:
        counts = ", ".join(f"GPU {index}: {count}" for index, count in errors.items())
        return fail(f"uncorrected memory errors: {counts}", "run nvidia-smi -r, or use another GPU")
    return ok(listed)


def gpus_idle(driver: Driver, env: Mapping[str, str]) -> Result:
    """Check that no other process uses the GPUs."""
    seen = visible_gpus(driver, env)
    if not seen:
        return skip("no GPU to look at")
    busy = [g for g in seen if g.pids or g.used_bytes > BUSY_SHARE * g.total_bytes]
    if not busy:
        used = max(gpu.used_bytes for gpu in seen)
        return ok(f"at most {bytes_text(used)} in use, no other process")
    listed = []
    for gpu in busy:
        who = f"processes {', '.join(map(str, gpu.pids))}" if gpu.pids else "no process shown"
        listed.append(f"GPU {gpu.index}: {bytes_text(gpu.used_bytes)} in use, {who}")
    free = [str(gpu.index) for gpu in driver.gpus if gpu not in busy]
    fix = "wait for them, or end them if they are yours"
    others = f"; or use idle ones: set CUDA_VISIBLE_DEVICES={','.join(free)}" if free else ""
    return fail("; ".join(listed), fix + others)


def cuda_stack(driver: Driver, facts: Mapping[str, Any]) -> Result:
    """Check that driver, CUDA, NCCL and torch fit together."""
    if "torch" not in facts:
        return fail(f"torch cannot be imported: {facts.get('error', '')}", "install torch")
    version, built = facts["torch"], facts.get("cuda")
    if driver.problem or not driver.gpus:
        if not built:
            return skip(f"torch {version} is built for the CPU, and there is no GPU")
        return skip(f"torch {version} is built for CUDA {built}, and there is no GPU")
    newest = f"{driver.cuda[0]}.{driver.cuda[1]}"
    if not built:
        return fail(
            f"{len(driver.gpus)} GPUs, but torch {version} is built for the CPU alone",
            f"install a torch built for CUDA {newest} or older",
        )
    major, minor = (int(part) for part in str(built).split(".")[:2])
    says = f"torch {version} needs CUDA {built}, driver {driver.version} serves up to {newest}"
    if major > driver.cuda[0]:
        return fail(says, f"install a newer driver, or a torch built for CUDA {newest} or older")
    if not facts.get("num_visible"):
        return fail(
            f"torch {version} (CUDA {built}) sees none of {len(driver.gpus)} GPUs",
            "run python -c 'import torch; torch.cuda.init()' to see why",
        )
    if not facts.get("nccl"):
        return fail(f"torch {version} has no NCCL", "install torch from pypi.org or pytorch.org")
    if (major, minor) > driver.cuda:
        return warn(f"{says} (same major version: works without new kernels)", "update the driver")
    return ok(f"driver {driver.version} (CUDA {newest}), torch {version}, NCCL {facts['nccl']}")


def versions(
    facts: Mapping[str, Any],
    requirements: Sequence[str] | None = None,
    find: Callable[[str], str] = metadata.version,
    python: str = platform.python_version(),
) -> Result:
    """Check that Python and every required package are installed and new enough."""
    wanted, remark = (requirements, "") if requirements is not None else _requirements()
    bad: list[str] = []
    missing_extras: list[str] = []
    for text in wanted:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[.*\])?\s*(?:>=\s*([0-9.]+))?", text)
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", text)
        if not match or match[1] == DISTRIBUTION or (extra and extra[1] in ("test", "all")):
            continue
        try:
            found = find(match[1])
        except metadata.PackageNotFoundError:
            (missing_extras if extra else bad).append(match[1])
            continue
        if match[2] and _numbers(found) < _numbers(match[2]):
            bad.append(f"{match[1]} {found} (needs {match[2]})")
    if _numbers(python) < (3, 11):
        bad.insert(0, f"Python {python} (needs 3.11)")
    if bad:
        fix = "run pip install --upgrade with these names, or use a newer Python"
        return fail(f"missing or too old: {', '.join(bad)}{remark}", fix)
    has = f"Python {python}, torch {facts.get('torch', 'unknown')}"
    if missing_extras:
        has += f"; without {', '.join(missing_extras)}"
    elif wanted:
        has += ", every extra"
    return warn(has + remark, "run pip install -e .") if remark else ok(has)


def _requirements(tree: Path = Path(__file__).parents[3]) -> tuple[Sequence[str], str]:
    """Return lockstep's requirements, and a remark if it is not installed but used from `tree`."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.requires(DISTRIBUTION) or [], ""
    remark = f"; lockstep is not installed, but used from {tree}"
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
        wanted = list(project["dependencies"])
        for extra, names in project["optional-dependencies"].items():
            wanted += [f"{name}; extra == '{extra}'" for name in names]
    except (OSError, ValueError, KeyError):
        return [], f"{remark} without its pyproject.toml, which lists the packages it needs"
    return wanted, remark


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def shared_memory(
    found: Findings | None = None, num_processes: int = 1, folder: Path = Path("/dev/shm")
) -> Result:
    """Check that shared memory has room for the batches of the loader's workers."""
    try:
        space = os.statvfs(folder)
    except OSError as error:
        return fail(f"{folder}: {error.strerror}", "mount a tmpfs there, or set num_workers=0")
    free = space.f_bavail * space.f_frsize
    has = f"{bytes_text(free)} free in {folder}"
    fix = "pass docker run --shm-size=8g (or --ipc=host), or lower num_workers (0 needs none)"
    if found is None or not found.batch_bytes:
        if free < SMALL_SHM_BYTES:
            return warn(f"{has}: loader workers hand their batches over there", fix)
        return ok(has)
    loader = found.config.get("loader", {})
    workers = loader.get("num_workers", 0)
    if not workers:
        return ok(f"{has}; no loader workers that would use it")
    queued = num_processes * workers * (loader.get("prefetch", 2) + 1)
    needed = queued * found.batch_bytes
    says = f"{has}, {bytes_text(needed)} for {queued} batches in flight"
    return ok(says) if needed <= free else fail(says, fix)


def open_files(found: Findings | None = None, limit: int | None = None) -> Result:
    """Check that a rank may open as many files as its loader's workers need."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    has = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} for each process"
    loader = found.config.get("loader", {}) if found else {}
    workers = loader.get("num_workers", 0)
    in_flight = workers * (loader.get("prefetch", 2) + 1) * (found.batch_tensors if found else 0)
    needed = FILES_EACH_RANK + 8 * workers + in_flight
    says = f"{has}, about {needed} needed with {workers} workers"
    if limit != resource.RLIM_INFINITY and limit < needed:
        return fail(says, "run ulimit -n 65536")
    if limit != resource.RLIM_INFINITY and limit < LOW_FILES:
        return warn(f"{says}; {LOW_FILES} is usual", "run ulimit -n 65536")
    return ok(says)
