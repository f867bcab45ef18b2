"""Checksums of the files of a folder, as `sha256sum` writes them: `sha256sum -c sha256sums` checks a folder by hand.

    files --digest--> write --> <folder>/sha256sums --read--> what each file should be --is_intact--> yes or no
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

NAME = "sha256sums"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")


def digest(path: Path) -> str:
    """Of a file's content, 64 hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, digests: dict[str, str]) -> None:
    """Keep the digests of files, by name, in the folder."""
    (folder / NAME).write_text("".join(f"{digests[name]}  {name}\n" for name in sorted(digests)))


def read(folder: Path, *patterns: str) -> dict[str, str]:
    """What `write` kept, by name of file. Digest "": what cannot be right, the list itself or files not in it.

    Args:
        patterns: of the files that must be in the list if they are in the folder.
    """
    try:
        *lines, rest = (folder / NAME).read_text().split("\n")  # splitlines would also split at a damaged end of line
    except (OSError, UnicodeDecodeError):
        return {NAME: ""}
    found = [_LINE.fullmatch(line) for line in lines]
    listed = {match[2]: match[1] for match in found if match}
    damaged = {NAME: ""} if rest or None in found else {}
    return {path.name: "" for pattern in patterns for path in folder.glob(pattern)} | listed | damaged


def is_intact(path: Path, expected: str) -> bool:
    """Whether a file can be read and is what it was; reads all of it."""
    try:
        return digest(path) == expected
    except OSError:
        return False
