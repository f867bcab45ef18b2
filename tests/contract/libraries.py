"""Names, fields and signatures of libraries, read from their source: no import, so neither a device nor their dependencies are needed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, Protocol

import torch

TAILS = (".py", "/__init__.py", ".pyi", "/__init__.pyi")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Missing(Exception):
    """A library does not have what it should have."""


class Files(Protocol):
    """A wheel or a folder."""

    def read(self, file: str) -> bytes | None: ...


@dataclass(frozen=True)
class Symbol:
    """Where a name was found."""

    module: str
    node: ast.AST
    owner: str | None = None
    """The class whose member it is."""


class Libraries:
    """What a Python with these files would import. Where several have a module the first wins."""

    def __init__(self, *files: Files) -> None:
        self._files, self._trees = files, dict[str, tuple[ast.Module, bool] | None]()
        self._sources: dict[str, tuple[bytes, bool] | None] = {}

    def find(self, module: str, path: str) -> Symbol:
        """`path` ("Class.member") of a module, through re-exports and base classes. Raises Missing."""
        name, *members = path.split(".")
        symbol = self._global(module, name)
        for member in members:
            if not isinstance(symbol.node, ast.ClassDef):
                raise Missing(f"{module}: {name} is not a class, so it has no {member}")
            found = self._member(symbol, member)
            if found is None:
                raise Missing(f"{symbol.module}.{symbol.node.name} has no {member}")
            symbol, name = found, member
        return symbol

    def signature(self, symbol: Symbol) -> Signature:
        """What a call must look like: of a function, a method without self, or a class. Raises Missing."""
        node = symbol.node
        if isinstance(node, ast.ClassDef):
            init = self._member(symbol, "__init__") or self._member(symbol, "__new__")
            return self.signature(init) if init else self._fields(symbol)
        if not isinstance(node, FUNCTIONS):
            raise Missing(f"{symbol.module}: {ast.unparse(node)[:80]} cannot be called")
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
        return _signature(node.args, skip_first=symbol.owner is not None and not static)

    def choices(self, symbol: Symbol, annotation: Any) -> set[Any] | None:
        """The values that an annotation allows, if it is a Literal or the name of one."""
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).split(".")[-1] == "Literal":
            inside = annotation.slice
            return {ast.literal_eval(value) for value in (inside.elts if isinstance(inside, ast.Tuple) else [inside])}
        if not isinstance(annotation, ast.Name):
            return None
        try:
            alias = self._global(symbol.module, annotation.id)
        except Missing:
            return None
        return self.choices(alias, alias.node.value) if isinstance(alias.node, ast.Assign) else None

    def has(self, key: str) -> bool:
        """Whether the first name below the modules of a dotted name is there; what lies further down only objects know."""
        parts = key.split(".")
        depth = next((i for i in range(len(parts), 0, -1) if self._load(".".join(parts[:i]))), 0)
        try:
            return depth == len(parts) or bool(depth and self._global(".".join(parts[:depth]), parts[depth]))
        except Missing:
            return False

    def tree(self, module: str) -> ast.Module:
        """A module's syntax. Raises Missing."""
        loaded = self._load(module)
        if loaded is None:
            raise Missing(f"there is no module {module}")
        return loaded[0]

    def members(self, symbol: Symbol) -> set[str]:
        """Names of a class and its bases: methods, fields and what methods assign to self."""
        own = {name for name, _ in _members(symbol.node)}
        return own.union(*(self.members(base) for base in self._bases(symbol)))

    def _load(self, module: str) -> tuple[ast.Module, bool] | None:
        """(syntax, whether it is a package)."""
        if module not in self._trees:
            found = self._source(module)
            self._trees[module] = found and (ast.parse(found[0]), found[1])
        return self._trees[module]

    def _source(self, module: str) -> tuple[bytes, bool] | None:
        """(text, whether it is a package)."""
        if module not in self._sources:
            stem = module.replace(".", "/")
            read = ((files.read(stem + tail), tail.startswith("/")) for files in self._files for tail in TAILS)
            self._sources[module] = next(((source, is_package) for source, is_package in read if source is not None), None)
        return self._sources[module]

    def _text(self, module: str) -> str:
        found = self._source(module)
        return found[0].decode() if found else ""

    def _global(self, module: str, name: str) -> Symbol:
        tree = self.tree(module)
        defined = [node for known, node in _globals(tree) if known == name]
        for node in reversed(defined):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                return Symbol(module, node)
        for node in (n for n in defined if isinstance(n, ast.ImportFrom)):
            origin = next(a.name for a in node.names if (a.asname or a.name) == name)
            source = self._absolute(module, node)
            if self._load(f"{source}.{origin}"):
                return Symbol(f"{source}.{origin}", self.tree(f"{source}.{origin}"))
            return self._global(source, origin)
        if self._load(f"{module}.{name}"):
            return Symbol(f"{module}.{name}", self.tree(f"{module}.{name}"))
        for source in (self._absolute(module, n) for known, n in _globals(tree) if known == "*" and isinstance(n, ast.ImportFrom)):
            if any(word in self._text(source) for word in (name, "import *")):  # parsing all of a large package takes long
                try:
                    return self._global(source, name)
                except Missing:
                    continue
        raise Missing(f"{module} has no {name}")

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        loaded = self._load(module)
        parts = module.split(".")[: len(module.split(".")) - node.level + bool(loaded and loaded[1])]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _member(self, symbol: Symbol, name: str) -> Symbol | None:
        assert isinstance(symbol.node, ast.ClassDef)
        found = [node for known, node in _members(symbol.node) if known == name]
        if found:
            return Symbol(symbol.module, next((n for n in reversed(found) if isinstance(n, FUNCTIONS)), found[0]), symbol.node.name)
        return next((m for base in self._bases(symbol) if (m := self._member(base, name))), None)

    def _bases(self, symbol: Symbol) -> Iterator[Symbol]:
        """Base classes whose source is there."""
        assert isinstance(symbol.node, ast.ClassDef)
        for base in symbol.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            try:
                found = self._global(symbol.module, name.split(".")[0])
                for part in name.split(".")[1:]:
                    found = self._global(found.module, part)
            except Missing:
                continue
            if isinstance(found.node, ast.ClassDef):
                yield found

    def _fields(self, symbol: Symbol) -> Signature:
        """The constructor of a dataclass or Struct: fields of the bases first."""
        parameters: dict[str, Parameter] = {}
        for base in self._bases(symbol):
            if not self._member(base, "__init__"):
                parameters |= self._fields(base).parameters
        for field in symbol.node.body:  # type: ignore[attr-defined]
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and "ClassVar" not in ast.unparse(field.annotation):
                default = Parameter.empty if field.value is None else None
                name = field.target.id
                parameters[name] = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation)
        return Signature(list(parameters.values()))


def schema(library: bytes, operator: str) -> Any:
    """The schema of an operator as it stands in a compiled library. Raises Missing unless it stands there exactly once."""
    start = f"{operator}(".encode()
    at = [i for i in _positions(library, start) if library[i - 1 : i] == b"\0"]
    texts = {library[i : library.index(b"\0", i)].decode() for i in at}
    if len(texts) != 1:
        raise Missing(f"{len(texts)} schemas of {operator}")
    return torch._C.parse_schema(f"npu::{texts.pop()}")


def schema_signature(parsed: Any) -> Signature:
    """What a call of an operator must look like."""
    kinds = {True: Parameter.KEYWORD_ONLY, False: Parameter.POSITIONAL_OR_KEYWORD}
    return Signature(
        [
            Parameter(a.name, kinds[a.kwarg_only], default=a.default_value if a.has_default_value() else Parameter.empty)
            for a in parsed.arguments
        ]
    )


def _positions(data: bytes, what: bytes) -> Iterator[int]:
    at = data.find(what)
    while at >= 0:
        yield at
        at = data.find(what, at + 1)


def _globals(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, statement) of everything that a module defines or imports, conditionally too."""
    todo: list[ast.AST] = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            todo += reversed(list(ast.iter_child_nodes(node)))
        elif isinstance(node, ast.ExceptHandler):
            todo += reversed(node.body)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        else:
            yield from _named(node)


def _members(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(name, statement) of a class's own members, and of what its methods assign to self."""
    assert isinstance(node, ast.ClassDef)
    for statement in node.body:
        yield from _named(statement)
        for inner in ast.walk(statement) if isinstance(statement, FUNCTIONS) else ():
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target] if isinstance(inner, ast.AnnAssign) else []
            for target in (t for group in targets for t in ast.walk(group)):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                    yield target.attr, inner


def _named(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield node.name, node
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def _signature(args: ast.arguments, *, skip_first: bool) -> Signature:
    positional = [(a, Parameter.POSITIONAL_ONLY) for a in args.posonlyargs] + [(a, Parameter.POSITIONAL_OR_KEYWORD) for a in args.args]
    required = len(positional) - len(args.defaults)
    made = [
        Parameter(a.arg, kind, default=Parameter.empty if i < required else None, annotation=a.annotation)
        for i, (a, kind) in enumerate(positional)
    ][skip_first:]
    if args.vararg:
        made.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        made.append(Parameter(a.arg, Parameter.KEYWORD_ONLY, default=None if default else Parameter.empty, annotation=a.annotation))
    if args.kwarg:
        made.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(made)
