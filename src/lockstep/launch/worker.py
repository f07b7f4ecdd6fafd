"""One rank: forked by `lockstep launch` from a process that has torch, or started by srun.

    srun python -m lockstep.launch.worker SCRIPT ...

Owns: running a script as `python SCRIPT` would, ending with its launcher, leaving a
record of how it ended. Does not own: the group; the script joins it.
"""

import atexit
import faulthandler
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from lockstep.dist import position
from lockstep.dist.detect import LAUNCH_ID, shows_traceback
from lockstep.errors import LaunchError, LockstepError, plain, sentence, shown
from lockstep.parent import end_with_parent
from lockstep.signals import last_exit_code
from lockstep.torch_compat.private import run_exit_functions

RECORD = "end.json"
"""The file with how and when a rank's script ended."""
POSITION = "position.bin"
"""The file with how far a rank has got; see `lockstep.dist.position`."""
PLACE = "place.txt"
"""The file to which a rank writes its stack when its launcher asks with SIGUSR2."""
FIRST_FAILURE = "LOCKSTEP_FIRST_FAILURE"
"""Variable with the path of a file, to which the first rank of a job that fails writes its error;
`job.sh` reads it."""


def work(*words: str) -> None:
    """Run `python *words` in this process."""
    end_with_parent()
    if os.getppid() == 1:  # the process that forked this one has ended already
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[LAUNCH_ID] = os.environ.get("TORCHELASTIC_RUN_ID", "")
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    if os.environ["LOCAL_RANK"] == "0":
        keep_log(folder)  # before signals are unblocked: its copier must outlive a signal to all
    with suppress(OSError):  # if the disk is full, the run continues and its launcher knows less
        position.this_rank.share(folder / POSITION)
    faulthandler.register(signal.SIGUSR2, (folder / PLACE).open("w"), all_threads=False)
    sys.excepthook = lambda kind, error, trace: leave_record(folder, code_of(error), error)
    code = 0
    try:
        # The process that forked this one blocks signals. One may be pending.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        run_script(words)
    except SystemExit as finished:
        code = exit_code(finished)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        code = code_of(error)
        leave_record(folder, code, error)
    # Ctrl-C in a terminal arrives twice, once through the launcher; ignore the second.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_record(folder, code)
    note_end(code)
    from lockstep.dist.process_group import let_gloo_finish

    atexit.unregister(let_gloo_finish)  # the interpreter is not torn down in this process
    run_exit_functions()  # Python does not run them in a forked process, and W&B relies on them
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit(0)`: torch would keep this process alive until all ranks are done. When it ends,
    # its connections close, and a rank that still waits for it notices.
    sys.exit(code or None)


def keep_log(folder: Path) -> None:
    """Copy this process's output to a file, unless it goes to a terminal.

    For the other ranks the agent writes such files, and each line is shown with its rank.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty():
            continue
        copier = subprocess.Popen(
            ["tee", "-ai", folder / f"{name}.log"],
            stdin=subprocess.PIPE,
            stdout=stream.fileno(),
            start_new_session=True,  # so that a signal to the process group does not reach it
        )
        assert copier.stdin is not None
        stream.flush()
        os.dup2(copier.stdin.fileno(), stream.fileno())
        copier.stdin.close()
        # The stream was a file and is now a pipe, which cannot seek.
        opened = os.fdopen(stream.fileno(), "w", buffering=1, closefd=False)
        if name == "stdout":
            sys.stdout = opened
        else:
            sys.stderr = opened


def check_script(words: Sequence[str]) -> None:
    """Refuse a command that `run_script` cannot run.

    Raises:
        LaunchError: the script does not exist, or `-m` has no module.
    """
    script = words[0] if words else ""
    if script == "-m":
        if len(words) < 2:
            raise LaunchError("-m needs the name of a module", "pass -m MODULE and its flags")
    elif os.path.isdir(script):
        raise LaunchError(
            f"{shown(script)} is a folder, not a script",
            f"pass a script in it: {plain(os.path.join(script, 'train.py'))}",
        )
    elif not os.path.isfile(script):
        raise LaunchError(
            f"there is no script {shown(script)}",
            "pass the path of a script, relative to this folder, or -m MODULE",
        )


def check_module(name: str) -> None:
    """Refuse a module that `run_script` cannot run.

    Raises:
        LaunchError: it cannot be found from this folder, or cannot be run as a program.
    """
    searched = sys.path.copy()
    sys.path.insert(0, os.getcwd())  # where `run_script` looks first
    try:
        found = _find_module(name)
        is_package = found is not None and found.submodule_search_locations is not None
        main = _find_module(f"{name}.__main__") if is_package else found
    except (Exception, SystemExit):  # raised by a package: ranks report it with the traceback
        return
    finally:
        sys.path[:] = searched
    if found is None and name.endswith(".py"):
        raise LaunchError(f"-m takes a module, and {plain(name)} is a script", "leave out -m")
    if found is None:
        raise LaunchError(
            f"there is no module {shown(name)}",
            "start from the folder that contains it, or install its package",
        )
    if main is None:
        raise LaunchError(
            f"the package {shown(name)} cannot be run: it has no __main__.py",
            f"pass a module in it: -m {plain(name)}.train",
        )
    if main.origin == "built-in" or isinstance(main.loader, ExtensionFileLoader):
        raise LaunchError(
            f"the module {shown(name)} cannot be run: it is not written in Python",
            "pass a module that trains: -m PACKAGE.train",
        )


def _find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, if possible without importing the packages that contain it.

    Some packages find their modules only after they are imported, so a package is imported before
    one of its modules is called missing. A plain module is never imported: it may be a script.
    """
    parent, _, last = name.rpartition(".")
    if not last:
        return None
    path = None
    if parent:
        package = _find_module(parent)
        path = package.submodule_search_locations if package is not None else None
        if path is None:
            return None
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return find_spec(name) if parent else None


def run_script(words: Sequence[str]) -> None:
    """Run a script, or a module after `-m`, as the main program.

    A script that ends normally although its run was stopped has not finished: exit with the code of
    that stop, so that the launcher can tell.
    """
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    if last_exit_code():
        sys.exit(last_exit_code())


def exit_code(finished: SystemExit) -> int:
    """Return the exit code that Python would use; print a text, which counts as an error."""
    if finished.code is None or isinstance(finished.code, int):
        return finished.code or 0
    sys.stderr.write(f"{finished.code}\n")
    return 1


def code_of(error: BaseException) -> int:
    """Return the exit code of a script that ends with `error`; lockstep's errors have their own."""
    return error.exit_code if isinstance(error, LockstepError) else 1


def note_end(code: int) -> None:
    """Tell the process group's exit function if this rank fails. All ranks agree on a stop."""
    runtime = sys.modules.get("lockstep.dist.process_group")  # if not imported, there is no group
    if runtime is not None and code not in (0, last_exit_code()):
        runtime.note_failure()


def leave_record(folder: Path, code: int, error: BaseException | None = None) -> None:
    """Write down how and when this rank ended, so that the launcher finds the first failure."""
    record = {
        "time": time.time(),
        "rank": int(os.environ["RANK"]),
        "host": socket.gethostname(),
        "code": code,
        "error": f"{type(error).__name__}: {error}" if error else "",
        "error_module": type(error).__module__ if error else "",
        "notes": getattr(error, "__notes__", []),
        "traceback": "",
    }
    if error is not None and (shows_traceback(os.environ) or not isinstance(error, LockstepError)):
        frames = _own_frames(error.__traceback__)
        record["traceback"] = "".join(traceback.format_exception(type(error), error, frames))
    path = folder / RECORD
    if not path.exists():  # the first record is the cause
        path.write_text(json.dumps(record))


def identity_of(error: str, notes: Sequence[str]) -> str:
    r"""Return one line that is equal for two identical failures: the error and its step.

    >>> identity_of("ValueError: two\n lines", ["on rank 1, after step 3"])
    'ValueError: two lines on rank 1, after step 3'
    """
    return " ".join(" ".join([error, *notes]).split())


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the error if this rank is the first to fail, else one line."""
    message = f"{kind.__name__}: {error}"
    identity = identity_of(message, getattr(error, "__notes__", []))
    if isinstance(error, KeyboardInterrupt) or _is_first(f"{code_of(error)}\n{identity}\n"):
        if isinstance(error, LockstepError) and not shows_traceback(os.environ):
            sys.stderr.write(sentence(error))
        else:
            traceback.print_exception(kind, error, _own_frames(trace))
    else:
        sys.stderr.write(f"{message.splitlines()[0]} (another rank had failed before)\n")


def _is_first(failure: str) -> bool:
    """Write down how this rank failed; return False if another rank of the job was first."""
    try:
        with open(os.environ[FIRST_FAILURE], "x") as file:
            file.write(failure)
    except FileExistsError:
        return False
    except (KeyError, OSError):  # not in a job of `lockstep submit`, or the file cannot be written
        pass
    return True


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames of this file and of `runpy`, to show only those of the script."""
    while trace is not None and trace.tb_next is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            return trace
        trace = trace.tb_next
    return trace


def be_task(words: Sequence[str]) -> None:
    """Run `python *words` as one of srun's tasks.

    A failure is recorded before this process ends, because the end makes the other ranks fail. The
    shell around each task in `job.sh` records the exit code of one that ends by `os._exit`.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which `python SCRIPT` would not search
    sys.excepthook = tell
    try:
        run_script(words)
    except SystemExit as finished:
        code = exit_code(finished)
        if code:
            _is_first(f"{code}\n")
        note_end(code)
        sys.exit(code)
    except LockstepError as error:
        tell(type(error), error, error.__traceback__)
        note_end(error.exit_code)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    be_task(sys.argv[1:])
