"""Atomic writes of files, and journal lines with chained digests."""

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyro_dp.utils.errors import ConfigurationError


def write_file(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write JSON to the disk atomically: a crash leaves the old file or the new one."""
    write_text(path, json.dumps(state, indent=1))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """As :func:`write_file`, for any text, in UTF-8."""
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path)


def sync_folder(path: Path) -> None:
    """Flush a file's new name to the disk, on systems that can synchronise folders."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_file(path: str | os.PathLike[str]) -> Any:
    """:raises ConfigurationError: the file is not JSON, as :func:`write_file` writes it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(
            f"{os.fspath(path)} is damaged, or no file of this package: not JSON ({error})."
        ) from None


def writable(text: str) -> Path:
    """The path of a command's argument, checked before anything is spent.

    :raises argparse.ArgumentTypeError: no file can be written there.
    """
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file in it.")
    if not os.path.isdir(path.parent):
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}.")
    if not os.access(path if os.path.exists(path) else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"no permission to write {path}.")
    return path


def line_of(value: Any, before: str) -> tuple[bytes, str]:
    """The journal line of a value, and its digest, which covers the digest of the line before."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    digest = _digest(text, before)
    return f"{digest} ".encode() + text + b"\n", digest


def value_of(line: bytes, before: str) -> tuple[Any, str]:
    """The value of a line without its newline, and the line's digest.

    :raises ValueError: the line does not match its digest.
    """
    digest, _, text = line.partition(b" ")
    expected = _digest(text, before)
    if digest != expected.encode():
        raise ValueError("it does not match its digest")
    return json.loads(text), expected


def _digest(text: bytes, before: str) -> str:
    return hashlib.blake2b(before.encode() + b" " + text, digest_size=8).hexdigest()
