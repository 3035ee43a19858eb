"""Finds whole checkpoints on disk: folders ``g<generation>-s<step>`` whose manifest and checksums agree."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.execution.core.state import Checkpoint

_NAME: Final = re.compile(r"g(\d{1,18})-s(\d{1,18})")
_CHUNK_BYTES: Final = 1 << 20


def find_checkpoints(directory: Path) -> Iterator[Checkpoint]:
    """Those that are whole, the highest step first. Reads every byte of each: take as few as needed.

    Blocking: hundreds of megabytes a second. An unreadable folder counts as none.
    """
    try:
        names = [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return
    matches = [(match, path) for path in names if (match := _NAME.fullmatch(path.name)) is not None]
    for match, path in sorted(matches, key=lambda m: (-int(m[0][2]), -int(m[0][1]), m[1].name)):
        generation, step = int(match[1]), int(match[2])
        if is_whole(path, generation=generation, step=step):
            yield Checkpoint(generation=generation, step=step, location=str(path))


def is_whole(path: Path, *, generation: int, step: int) -> bool:
    """The manifest names this generation and step, and every file has the checksum that it gives."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        files = manifest["files"]
        right = manifest["generation"] == generation and manifest["step"] == step
        return right and bool(files) and all(_sha256(path / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
