"""`lockstep submit`: turn flags into a SLURM job, then print it, or submit and follow it."""

import re
import sys

from lockstep.errors import ConfigError, plain
from lockstep.launch.slurm import Follower, Job, check, job_script, submit


def submit_job(job: Job, dry_run: bool, follow: bool) -> int:
    """Submit or print the job and return the exit code: the job's own, if it is followed.

    Raises:
        LockstepError: before anything is submitted, if the request makes no sense.
    """
    check(job)
    if dry_run:
        print(job_script(job, sys.executable), end="")
        return 0
    job_id = submit(job, sys.executable)
    log = job.file(job_id, "log")
    if job.array:
        log = job.file("*", "log")  # every array task has its own number
    print(f"lockstep: job {job_id}, log {log}", file=sys.stderr)
    if not follow or job.array:
        return 0
    try:
        return Follower(job_id, log).follow()
    except KeyboardInterrupt:
        print(
            f"\nlockstep: job {job_id} is still running; scancel {job_id} ends it", file=sys.stderr
        )
        return 130


def read_options(texts: list[str]) -> dict[str, str]:
    """Parse the texts of `--sbatch NAME=VALUE`; an option without a value is a name alone.

    >>> read_options(["qos=high", "--exclude=node[3-4]", "exclusive"])
    {'qos': 'high', 'exclude': 'node[3-4]', 'exclusive': ''}

    Raises:
        ConfigError: if one of them has no name.
    """
    pairs = [text.removeprefix("--").partition("=") for text in texts]
    for text, (name, _, _) in zip(texts, pairs, strict=True):
        if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
            raise ConfigError(
                f"--sbatch {plain(text)} is not an option of sbatch", "write --sbatch qos=high"
            )
    return {name: value for name, _, value in pairs}
