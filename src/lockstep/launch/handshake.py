"""Authentication between the launchers of a job, and the messages they exchange afterwards.

Owns: the job token, the proof that both sides of a connection know it, lines of JSON. Does not own:
the meaning of messages (`coordinator.py`, `member.py`).

The token itself is never sent. Each side sends a random number and receives the HMAC of both
numbers, so that a recorded proof is useless on another connection.
"""

import asyncio
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LaunchError

TOKEN_VARIABLE = "LOCKSTEP_JOB_TOKEN"
MIN_TOKEN_CHARACTERS = 16
MAGIC = b"lockstep-rendezvous-2\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
ACCEPTED = b"+"
DENIED = b"-"
HANDSHAKE_S = 10.0
"""Time that a connection gets to prove the token before it is dropped."""
LINE_BYTES = 64 * 1024
"""The longest line that either side reads."""
BROKEN = (OSError, EOFError, ValueError, TimeoutError)
"""Errors of a connection that ended, timed out, or sent something invalid."""


class WrongTokenError(Exception):
    """The other side of a connection knows another token."""


def job_token(env: Mapping[str, str]) -> bytes:
    """Return the secret that the nodes of a job share: from a variable, else from the key file.

    Raises:
        LaunchError: neither can be used.
    """
    token = env.get(TOKEN_VARIABLE, "")
    if not token:
        return _read_or_make_key(key_path(env))
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise LaunchError(
            f"{TOKEN_VARIABLE} has {len(token)} characters, fewer than {MIN_TOKEN_CHARACTERS}, "
            "and could be guessed",
            f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16), the same value on every node",
        )
    return token.encode()


def key_path(env: Mapping[str, str]) -> Path:
    """Return the path of the user's key file.

    >>> key_path({"XDG_CONFIG_HOME": "/home/ada/.config"}).as_posix()
    '/home/ada/.config/lockstep/job_key'
    """
    folder = env.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "lockstep" / "job_key"


def _read_or_make_key(path: Path) -> bytes:
    remedy = f"set {TOKEN_VARIABLE} to the same random value on every node"
    try:
        if not path.exists():
            _make_key(path)
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            key = file.read(1024).strip()
    except OSError as error:
        raise LaunchError(
            f"the job key {path} cannot be used: {os.strerror(error.errno or 0)}", remedy
        ) from error
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise LaunchError(
            f"the job key {path} may be read by others "
            f"(owner {about.st_uid}, mode {stat.S_IMODE(about.st_mode):04o})",
            f"run chmod 600 {path}, or {remedy}",
        )
    if len(key) < MIN_TOKEN_CHARACTERS:
        raise LaunchError(
            f"the job key {path} has {len(key)} characters, fewer than {MIN_TOKEN_CHARACTERS}",
            f"remove it, so that the next launch makes a new one, or {remedy}",
        )
    return key


def _make_key(path: Path) -> None:
    """Make the key file. If several nodes that share the folder try at once, one succeeds."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        pass  # another node was first, and its key is the one to read
    finally:
        draft.unlink(missing_ok=True)


# --- The proof -----------------------------------------------------------------


def _proof(token: bytes, side: bytes, head_nonce: bytes, node_nonce: bytes) -> bytes:
    return hmac.digest(token, MAGIC + side + head_nonce + node_nonce, "sha256")


async def welcome_node(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """On node 0: check that the other side knows the token, then prove it to that side.

    Raises:
        WrongTokenError: it knows a different token.
        ValueError: it uses another protocol.
    """
    head_nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + head_nonce)
    await _read_magic(reader)
    node_nonce = await reader.readexactly(NONCE_BYTES)
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"node", head_nonce, node_nonce)):
        writer.write(DENIED)
        await writer.drain()
        raise WrongTokenError
    writer.write(ACCEPTED + _proof(token, b"head", head_nonce, node_nonce))
    await writer.drain()


async def greet_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes
) -> None:
    """Prove the token to node 0, and check that node 0 knows it too.

    Raises:
        WrongTokenError: node 0 knows a different token.
        ValueError: the other side uses another protocol.
    """
    await _read_magic(reader)
    head_nonce = await reader.readexactly(NONCE_BYTES)
    node_nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(MAGIC + node_nonce + _proof(token, b"node", head_nonce, node_nonce))
    if await reader.readexactly(1) != ACCEPTED:
        raise WrongTokenError
    proof = await reader.readexactly(PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"head", head_nonce, node_nonce)):
        raise WrongTokenError


async def _read_magic(reader: asyncio.StreamReader) -> None:
    if await reader.readexactly(len(MAGIC)) != MAGIC:
        raise ValueError("the other side is not a launcher of this version of lockstep")


# --- Lines -----------------------------------------------------------------------


def send(writer: asyncio.StreamWriter, kind: str, **values: Any) -> None:
    """Send a message, without waiting for the other side to receive it."""
    if not writer.is_closing():
        writer.write(json.dumps({"kind": kind, **values}).encode() + b"\n")


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message.

    Raises:
        EOFError: the connection ended.
        ValueError: the line is too long, or not a message.
    """
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    message = json.loads(line)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("not a message")
    return message


# --- Tunnels ---------------------------------------------------------------------


async def splice(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Copy data in both directions until one of the connections ends."""
    ways = [
        asyncio.ensure_future(_copy(one[0], other[1])),
        asyncio.ensure_future(_copy(other[0], one[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        one[1].close()
        other[1].close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(LINE_BYTES):
        writer.write(data)
        await writer.drain()
