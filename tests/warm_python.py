"""Python that has imported torch already, for tests that type commands which start many processes.

Most of the time of a short command goes into importing torch, in each of its processes. A server
imports it once; `python`, `torchrun` and `lockstep`, found first on a PATH, ask the server for a
copy of itself, which becomes the process that was asked for: its words, folder, environment and
streams, its own session, its exit code or signal. What asked lives as long as what it asked for,
passes signals on, and takes it along when it is killed.

Options of Python's that need a fresh interpreter get one. Each recipe has commands that are
started without any of this (`recipes/test_guide_commands.py`).
"""

import array
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
PROGRAMS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run"],
    "lockstep": ["-m", "lockstep.cli.entry"],
}
IMPORTED = (
    "lockstep.trainer",
    "lockstep_recipes.command",
    "torch._dynamo",
    "torch.distributed.run",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "PIL.PngImagePlugin",
)
STAND_IN = """#!{python} -IS
import sys
sys.path.append({here!r})
from warm_python import ask
ask({socket!r}, {words!r} + sys.argv[1:])
"""
START_S = 60.0


# --- The program that asks ----------------------------------------------------


def ask(address: str, words: list[str]) -> NoReturn:
    """Have the server become `python WORDS`, and end as that ends."""
    if not takes(words):
        os.execv(sys.executable, [sys.executable, *words])
    request = json.dumps({"words": words, "folder": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)

        def pass_on(number: int, frame: object) -> None:
            link.send(bytes([number]))

        streams = array.array("i", [0, 1, 2])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        link.sendmsg([struct.pack("i", len(request))], rights)
        link.sendall(request)
        for name in PASSED_ON:
            signal.signal(getattr(signal, name), pass_on)
        answer = link.recv(4)
    if not answer:
        os._exit(70)  # the server is gone
    (code,) = struct.unpack("i", answer)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def takes(words: list[str]) -> bool:
    """Say whether the server can become this: a script or a module, perhaps unbuffered."""
    words = words[1:] if words[:1] == ["-u"] else words
    return bool(words) and (words[0] == "-m" or not words[0].startswith("-"))


# --- The server ---------------------------------------------------------------


def serve(address: str) -> None:
    """Import, then answer requests until the test session ends; return in each copy."""
    import importlib

    for name in IMPORTED:
        importlib.import_module(name)
    import gc

    gc.collect()
    gc.freeze()
    session = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end unwatched
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{address}.new")
        door.listen(64)
        os.rename(f"{address}.new", address)
        door.settimeout(1.0)
        while os.getppid() == session:
            try:
                link, _ = door.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                door.close()
                link.setblocking(True)
                keep(link)
                return
            link.close()
    os._exit(0)


def keep(link: socket.socket) -> None:
    """Start what `link` asks for, pass signals on to it, answer with its end. Returns as it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, rights, _, _ = link.recvmsg(4, socket.CMSG_SPACE(12))
    streams = array.array("i")
    streams.frombytes(rights[0][2][:12])
    (length,) = struct.unpack("i", head)
    request = json.loads(link.recv(length, socket.MSG_WAITALL))
    child = os.fork()
    if child == 0:
        link.close()
        become(request, list(streams))
        return
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([link, ended], [], [])
        if ended in ready:
            break
        numbers = link.recv(16)
        if not numbers:  # what asked was killed
            os.killpg(child, signal.SIGKILL)
            os._exit(0)
        for number in numbers:
            os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    link.sendall(struct.pack("i", code))
    os._exit(0)


def become(request: dict[str, Any], streams: list[int]) -> None:
    """Be as a fresh interpreter is that was started so."""
    os.setsid()
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    words = request["words"]
    is_unbuffered = words[0] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False, encoding="utf-8")
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8", errors="surrogateescape")
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, encoding="utf-8")
    if is_unbuffered:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv = words[1:] if words[0] == "-u" else list(words)
    import numpy

    numpy.random.seed()


def run_as_main(words: list[str]) -> None:
    """Run a script or a module, as Python does: what it raises ends this process."""
    import runpy

    extra = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:1] = [os.getcwd(), *extra]
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(words[0]).resolve().parent), *extra]
        runpy.run_path(words[0], run_name="__main__")


# --- What a test session starts -----------------------------------------------


def start(folder: Path) -> tuple[Path, Callable[[], None]]:
    """Start a server; return the folder with the programs that ask it, and how to end it."""
    address, programs = folder / "socket", folder / "bin"
    programs.mkdir(parents=True)
    for name, words in PROGRAMS.items():
        here = str(Path(__file__).parent)
        text = STAND_IN.format(python=sys.executable, here=here, socket=str(address), words=words)
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, __file__, str(address)], env=env)
    deadline = time.monotonic() + START_S
    while not address.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise RuntimeError("the server of warm processes did not start")
        time.sleep(0.02)

    def end() -> None:
        server.kill()
        server.wait()

    return programs, end


if __name__ == "__main__":
    serve(sys.argv[1])
    run_as_main(sys.argv)
