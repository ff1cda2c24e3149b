"""The lines of a journal: a digest and a JSON value.

The digest covers the value and, through the digest before it, all lines above.
"""

import hashlib
import json
from typing import Any


def line_of(value: Any, before: str) -> tuple[bytes, str]:
    """A line and its digest, after the digest of the line above."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    digest = _digest(text, before)
    return f"{digest} ".encode() + text + b"\n", digest


def value_of(line: bytes, before: str) -> tuple[Any, str]:
    """The value of a line, without its end, and its digest.

    :raises ValueError: the line does not match its digest.
    """
    digest, _, text = line.partition(b" ")
    expected = _digest(text, before)
    if digest != expected.encode():
        raise ValueError("it does not match its digest")
    return json.loads(text), expected


def _digest(text: bytes, before: str) -> str:
    return hashlib.blake2b(before.encode() + b" " + text, digest_size=8).hexdigest()
