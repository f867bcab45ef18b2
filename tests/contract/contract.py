"""Compares what our code uses with what the contract allows and the libraries hold; everything wrong is one line of text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from inspect import Signature

from libraries import Libraries, Missing, schema, schema_signature
from rows import NOT_CHECKABLE, NPU_LIBRARY, ROWS, VARIABLES, Row
from scan import Use


def without_row(uses: Iterable[Use]) -> list[str]:
    """Uses of names that the contract does not know, and calls that could not be followed."""
    modules = {key.rsplit(".", i)[0] for key in ROWS for i in range(1, key.count(".") + 1)}
    ours = [use for use in uses if not use.key.startswith("torch.") or use.key.startswith("torch.ops.npu.")]
    read = {use for use in ours if use.call is None and use.key in modules}
    unknown = [f"{use.where}: {use.key} has no row in rows.py" for use in ours if use.key not in ROWS and use not in read]
    return sorted(unknown + [f"{use.where}: {use.key} {use.problem}" for use in ours if use.problem])


def unheld(row: Row, libraries: Libraries, npu_library: bytes) -> list[str]:
    """What is wrong with a row."""
    try:
        if row.file == NPU_LIBRARY:
            schema(npu_library, row.symbol)
        else:
            libraries.find(_module(row.file), row.symbol)
    except Missing as error:
        return [f"{row.file}: {row.symbol}: {error}"]
    return []


def misused(use: Use, libraries: Libraries, npu_library: bytes) -> list[str]:
    """What is wrong with a call, or with a function of ours that replaces one of a library."""
    if use.call is None and use.replaced_by is None:
        return []
    row = ROWS[use.key]
    try:
        signature = _signature(row, libraries, npu_library)
        if use.call is None:
            theirs = tuple(signature.parameters)
            return [] if theirs == use.replaced_by else [f"{use.where}: takes {use.replaced_by}, {use.key} takes {theirs}"]
        signature.bind(*[None] * use.call.positional, **dict.fromkeys(use.call.keywords))
    except (TypeError, Missing) as error:
        return [f"{use.where}: {use.key}: {error}"]
    bad = _bad_texts(use, row, signature, libraries)
    return [f"{use.where}: {use.key}: {name}={text!r} is none of {allowed}" for name, text, allowed in bad]


def unknown_variables(names: Iterable[str]) -> list[str]:
    """Environment variables that the contract does not know."""
    return [f"{name}: has no row in rows.py" for name in names if name not in VARIABLES and name not in NOT_CHECKABLE]


def reads(file: bytes, variable: str) -> bool:
    """Whether a file, source or compiled, names an environment variable."""
    return re.search(rb"(?<![A-Z0-9_])" + variable.encode() + rb"(?![A-Z0-9_])", file) is not None


def _bad_texts(use: Use, row: Row, signature: Signature, libraries: Libraries) -> list[tuple[str, str, set[str]]]:
    """(parameter, given string, allowed ones) where a parameter allows only some."""
    found = []
    for name, text in use.call.texts if use.call and row.file != NPU_LIBRARY else ():
        if name in signature.parameters:
            symbol = libraries.find(_module(row.file), row.symbol)
            allowed = libraries.choices(symbol, signature.parameters[name].annotation)
            if allowed is not None and text not in allowed:
                found.append((name, text, allowed))
    return found


def _signature(row: Row, libraries: Libraries, npu_library: bytes) -> Signature:
    if row.file == NPU_LIBRARY:
        return schema_signature(schema(npu_library, row.symbol))
    return libraries.signature(libraries.find(_module(row.file), row.symbol))


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
