"""What our code uses of vLLM, vllm-ascend and torch_npu: a walk over its syntax trees that follows values and runs nothing.

    import, class path in a string, torch.get_device_module --> value
        --assigned, passed, returned, unpacked, through all of pasync--> attribute, call = one Use

A value of a library is known by the dotted name of its class or function; instances, lists, iterators and awaitables of a class all
go by the name of the class. What an attribute or a call gives, `gives` says: rows.py. Whatever cannot be followed into a call (an
unpacked dict of unknown keys) becomes a Use with a problem.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

LIBRARIES = ("vllm", "vllm_ascend", "torch_npu", "torch")
CLASS_PATH = re.compile(r"(vllm|vllm_ascend|torch_npu)(\.\w+)+")
EXTENSION = "worker_extension_cls"
WORKERS = ("vllm_ascend.worker.worker.NPUWorker", "vllm.v1.worker.gpu_worker.Worker")
"""Classes that vLLM puts our worker extension under."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
COLLECTIONS = ("list", "tuple", "set", "iter", "next", "sorted", "reversed", "deque", "cast")
MOST_NESTED = 3
"""Tuples in tuples that are told apart; without a limit a tuple that is put into itself would grow for ever."""


@dataclass(frozen=True)
class Call:
    """Arguments of a call."""

    positional: int
    keywords: frozenset[str]
    texts: frozenset[tuple[str, str]] = frozenset()
    """Keyword arguments that are constant strings."""


@dataclass(frozen=True)
class Use:
    """One place where our code relies on a library."""

    key: str
    where: str
    call: Call | None = None
    replaced_by: tuple[str, ...] | None = None
    """Parameters of our function that is put in this place."""
    problem: str = ""


@dataclass(frozen=True)
class Foreign:
    """Something of a library."""

    key: str


@dataclass(frozen=True)
class Own:
    """A module, class (or an instance of it) or function of ours."""

    name: str


@dataclass(frozen=True)
class Several:
    """A tuple."""

    parts: tuple[frozenset[Any], ...]


@dataclass(frozen=True)
class Keys:
    """A dict: keys and, where constant, their strings; `open` if there are others."""

    known: frozenset[tuple[str, str | None]]
    open: bool = False


Values = frozenset[Any]
NOTHING: Values = frozenset()


def scan(sources: dict[str, tuple[str, str]], gives: Callable[[str], str | None]) -> set[Use]:
    """All uses in modules given as {dotted name: (file, source)}.

    Args:
        gives: class of what reading or calling a name of a library gives; None if nothing that matters.
    """
    walk = _Walk(sources, gives)
    while walk.changed:
        walk.changed = False
        walk.run()
    walk.uses.clear()
    walk.run()
    return walk.uses


def package(root: Path) -> dict[str, tuple[str, str]]:
    """All modules of pasync below `root`."""
    found = {}
    for path in sorted((root / "pasync").rglob("*.py")):
        file = path.relative_to(root)
        parts = file.with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (str(file), path.read_text())
    return found


def variables_read(source: str) -> set[str]:
    """Environment variables that a source names when it reads or writes os.environ."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        inside = node.value if isinstance(node, ast.Subscript) else node.func if isinstance(node, ast.Call) else None
        if inside is not None and ast.unparse(inside).startswith(("os.environ", "os.getenv")):
            named = node.slice if isinstance(node, ast.Subscript) else next(iter(node.args), None)  # type: ignore[attr-defined]
            found |= {named.value} if isinstance(named, ast.Constant) and isinstance(named.value, str) else set()
        elif isinstance(node, ast.Compare) and "os.environ" in map(ast.unparse, node.comparators):
            found |= {node.left.value} if isinstance(node.left, ast.Constant) else set()
    return found


class _Walk:
    def __init__(self, sources: dict[str, tuple[str, str]], gives: Callable[[str], str | None]) -> None:
        self.trees = {module: (file, ast.parse(source)) for module, (file, source) in sources.items()}
        self.gives, self.uses, self.changed = gives, set[Use](), True
        self.values: dict[str, Values] = {}
        self.defined: dict[str, ast.AST] = {module: tree for module, (_, tree) in self.trees.items()}
        for module, (_, tree) in self.trees.items():
            self._define(module, tree)
        strings = (k.value for _, t in self.trees.values() for k in ast.walk(t) if isinstance(k, ast.keyword) and k.arg == EXTENSION)
        self.extensions = {node.value for node in strings if isinstance(node, ast.Constant)}

    def run(self) -> None:
        for module, (file, tree) in self.trees.items():
            self.file, self.scope, self.module = file, module, module
            self._body(tree.body)

    # names

    def _define(self, scope: str, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{scope}.{child.name}" if isinstance(child, SCOPES) else scope
            if isinstance(child, SCOPES):
                self.defined[name] = child
            self._define(name, child)

    def _set(self, name: str, values: Iterable[Any]) -> None:
        old = self.values.get(name, NOTHING)
        new = _merged(old | frozenset(values))
        if new != old:
            self.values[name], self.changed = new, True

    def _look_up(self, name: str) -> Values:
        scope = self.scope
        while scope.startswith(self.module):
            full = f"{scope}.{name}"
            if full in self.defined:
                return frozenset({Own(full)})
            if full in self.values:
                return self.values[full]
            scope = scope.rpartition(".")[0]
        return NOTHING

    def _use(self, key: str, node: ast.AST, **more: Any) -> None:
        self.uses.add(Use(key, f"{self.file}:{getattr(node, 'lineno', 0)}", **more))

    # statements

    def _body(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, SCOPES):
            self._definition(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.Assign):
            value = self._value(node.value)
            for target in node.targets:
                self._bind(target, value)
        elif isinstance(node, ast.AnnAssign):
            annotated = self._annotation(node.annotation)
            self._bind(node.target, annotated | (self._value(node.value) if node.value else NOTHING))
        elif isinstance(node, ast.AugAssign):
            self._bind(node.target, self._value(node.value))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind_each(node.target, self._value(node.iter))
            self._body(node.body + node.orelse)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self._value(item.context_expr)
                if item.optional_vars:
                    self._bind(item.optional_vars, value)
            self._body(node.body)
        elif isinstance(node, ast.Return):
            self._set(f"{self.scope}()", self._value(node.value) if node.value else NOTHING)
        else:
            for child in ast.iter_child_nodes(node):
                self._any(child)

    def _any(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement(node)
        elif isinstance(node, ast.expr):
            self._value(node)
        else:  # except handlers, match cases
            for child in ast.iter_child_nodes(node):
                self._any(child)

    def _definition(self, node: Any) -> None:
        outer = self.scope
        for decorator in node.decorator_list:
            self._value(decorator)
        inner = f"{outer}.{node.name}"
        if isinstance(node, ast.ClassDef):
            self._set(f"{inner}<", chain.from_iterable(self._value(base) for base in node.bases))
        else:
            for value in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self._value(value)
            for parameter in _parameters(node):
                self._set(f"{inner}.{parameter.arg}", self._annotation(parameter.annotation))
            if node.returns:
                self._set(f"{inner}()", self._annotation(node.returns))
            if isinstance(self.defined.get(outer), ast.ClassDef) and not _is_static(node) and _parameters(node):
                self._set(f"{inner}.{_parameters(node)[0].arg}", {Own(outer)})
        self.scope = inner
        self._body(node.body)
        self.scope = outer

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                origin = f"{node.module}.{alias.name}" if node.module else alias.name
                self._set(f"{self.scope}.{alias.asname or alias.name}", self._imported(origin, node))
            else:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self._imported(alias.name, node)
                self._set(f"{self.scope}.{alias.asname or name}", self._named(name))

    def _imported(self, origin: str, node: ast.AST) -> Values:
        if origin.split(".")[0] in LIBRARIES and origin != "torch":
            self._use(_canonical(origin), node)
        return self._named(origin)

    def _named(self, origin: str) -> Values:
        if origin.split(".")[0] in LIBRARIES:
            key = _canonical(origin)
            return frozenset({Foreign(self.gives(key) or key)})
        return frozenset({Own(origin)}) if origin in self.defined else self.values.get(origin, NOTHING)

    def _annotation(self, node: ast.expr | None) -> Values:
        """Classes that an annotation names, those inside list[..] and X | None too."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._value(node)
        parts = (node.left, node.right) if isinstance(node, ast.BinOp) else ast.iter_child_nodes(node) if node else ()
        return frozenset(chain.from_iterable(self._annotation(p) for p in parts if isinstance(p, ast.expr)))

    def _bind(self, target: ast.expr, values: Values) -> None:
        if isinstance(target, ast.Name):
            self._set(f"{self.scope}.{target.id}", values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for i, element in enumerate(target.elts):
                self._bind(element.value if isinstance(element, ast.Starred) else element, _part(values, i, len(target.elts)))
        elif isinstance(target, ast.Attribute):
            for base in self._value(target.value):
                if isinstance(base, Own):
                    self._set(f"{base.name}.{target.attr}", values)
                elif isinstance(base, Foreign):
                    ours = [self.defined.get(v.name) for v in values if isinstance(v, Own)]
                    names = [tuple(p.arg for p in _parameters(f)) for f in ours if isinstance(f, FUNCTIONS)]
                    self._use(_canonical(f"{base.key}.{target.attr}"), target, replaced_by=names[0] if names else None)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, (ast.Name, ast.Attribute)):
            self._value(target.slice)
            known = isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)
            keys = {Keys(frozenset({(target.slice.value, None)}))} if known else set()  # type: ignore[attr-defined]
            self._bind(target.value, values | keys)

    def _bind_each(self, target: ast.expr, values: Values) -> None:
        """`for target in values`; the elements of a tuple, unless they are what the target unpacks."""
        width = len(target.elts) if isinstance(target, (ast.Tuple, ast.List)) else None
        for value in values:
            fits = not isinstance(value, Several) or len(value.parts) == width
            self._bind(target, frozenset({value}) if fits else frozenset(chain.from_iterable(value.parts)))

    # expressions

    def _value(self, node: ast.expr) -> Values:
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method:
            return method(node)
        inner = [self._value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        passes_on = isinstance(node, (ast.Await, ast.Starred, ast.IfExp, ast.BoolOp, ast.BinOp, ast.List, ast.Set))
        return frozenset(chain.from_iterable(inner)) if passes_on else NOTHING

    def _of_constant(self, node: ast.Constant) -> Values:
        if isinstance(node.value, str) and CLASS_PATH.fullmatch(node.value):
            self._use(node.value, node)
        return NOTHING

    def _of_name(self, node: ast.Name) -> Values:
        return self._look_up(node.id)

    def _of_tuple(self, node: ast.Tuple) -> Values:
        return frozenset({_several([self._value(element) for element in node.elts])})

    def _of_dict(self, node: ast.Dict) -> Values:
        found: Values = NOTHING
        for key, value in zip(node.keys, node.values, strict=True):
            values = self._value(value)
            if key is None:
                found |= values if any(isinstance(v, Keys) for v in values) else values | {Keys(frozenset(), True)}
            else:
                self._value(key)
                known = isinstance(key, ast.Constant) and isinstance(key.value, str)
                found |= values - {v for v in values if isinstance(v, Keys)}
                found |= {Keys(frozenset({(key.value, _text(value))})) if known else Keys(frozenset(), True)}  # type: ignore[attr-defined]
        return _merged(found | {Keys(frozenset())})

    def _of_dictcomp(self, node: ast.DictComp) -> Values:
        self._generators(node.generators)
        self._value(node.key)
        return self._value(node.value) | {Keys(frozenset(), True)}

    def _of_listcomp(self, node: Any) -> Values:
        self._generators(node.generators)
        return self._value(node.elt)

    _of_setcomp = _of_generatorexp = _of_listcomp

    def _generators(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self._bind_each(generator.target, self._value(generator.iter))
            for condition in generator.ifs:
                self._value(condition)

    def _of_namedexpr(self, node: ast.NamedExpr) -> Values:
        value = self._value(node.value)
        self._bind(node.target, value)
        return value

    def _of_lambda(self, node: ast.Lambda) -> Values:
        return self._value(node.body)

    def _of_yield(self, node: ast.Yield) -> Values:
        self._set(f"{self.scope}()", self._value(node.value) if node.value else NOTHING)
        return NOTHING

    def _of_yieldfrom(self, node: ast.YieldFrom) -> Values:
        self._set(f"{self.scope}()", self._value(node.value))
        return NOTHING

    def _of_subscript(self, node: ast.Subscript) -> Values:
        values = self._value(node.value)
        self._value(node.slice)
        if isinstance(node.slice, ast.Slice):
            return values
        index = node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int) else None
        found: Values = NOTHING
        for value in values:
            if isinstance(value, Several):
                in_range = index is not None and 0 <= index < len(value.parts)
                found |= value.parts[index] if in_range else frozenset(chain.from_iterable(value.parts))  # type: ignore[index]
            elif not isinstance(value, Keys):
                found |= {value}
        return found

    def _of_attribute(self, node: ast.Attribute) -> Values:
        return frozenset(chain.from_iterable(self._attribute(base, node.attr, node) for base in self._value(node.value)))

    def _attribute(self, base: Any, name: str, node: ast.AST) -> Values:
        if isinstance(base, Foreign):
            key = _canonical(f"{base.key}.{name}")
            self._use(key, node)
            return frozenset({Foreign(self.gives(key) or key)})
        if not isinstance(base, Own):
            return NOTHING
        full = f"{base.name}.{name}"
        if full in self.defined:
            return self.values.get(f"{full}()", NOTHING) if _is_property(self.defined[full]) else frozenset({Own(full)})
        if full in self.values:
            return self.values[full]
        above = self.values.get(f"{base.name}<", NOTHING) | ({Foreign(w) for w in WORKERS} if base.name in self.extensions else NOTHING)
        return frozenset(chain.from_iterable(self._attribute(parent, name, node) for parent in above))

    # calls

    def _of_call(self, node: ast.Call) -> Values:
        callees = self._value(node.func)
        args = [self._value(a) for a in node.args]
        keywords = {k.arg: self._value(k.value) for k in node.keywords}
        found: Values = NOTHING
        for callee in callees:
            if isinstance(callee, Foreign):
                found |= self._foreign_call(callee, node, args)
            elif isinstance(callee, Own):
                found |= self._own_call(callee.name, node, args, keywords)
        return found if any(isinstance(c, Own) for c in callees) else found | self._known_call(node, args, keywords)

    def _foreign_call(self, callee: Foreign, node: ast.Call, args: list[Values]) -> Values:
        if callee.key == "torch.get_device_module":
            return frozenset({Foreign("torch_npu.npu")})
        if callee.key.startswith("torch.") and not callee.key.startswith("torch.ops.npu."):
            return NOTHING
        problem, count, keys = "", 0, Keys(frozenset((k.arg, _text(k.value)) for k in node.keywords if k.arg))
        for given, values in zip(node.args, args, strict=True):
            widths = {len(v.parts) for v in values if isinstance(v, Several)}
            problem = "unpacks a list of unknown length" if isinstance(given, ast.Starred) and len(widths) != 1 else problem
            count += next(iter(widths), 0) if isinstance(given, ast.Starred) else 1
        for unpacked in (k.value for k in node.keywords if k.arg is None):
            dicts = [v for v in self._value(unpacked) if isinstance(v, Keys)]
            problem = "unpacks a dict of unknown keys" if not dicts or any(d.open for d in dicts) else problem
            keys = Keys(keys.known.union(*(d.known for d in dicts)))
        texts = frozenset((k, text) for k, text in keys.known if text is not None)
        self._use(callee.key, node, call=Call(count, frozenset(k for k, _ in keys.known), texts), problem=problem)
        gives = self.gives(f"{callee.key}()")
        return frozenset({Foreign(gives)}) if gives else NOTHING

    def _own_call(self, name: str, node: ast.Call, args: list[Values], keywords: dict[str | None, Values]) -> Values:
        definition = self.defined.get(name)
        if isinstance(definition, ast.ClassDef):
            if f"{name}.__init__" in self.defined:
                self._own_call(f"{name}.__init__", node, args, keywords)
            fields = [s.target.id for s in definition.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            for field, values in [*zip(fields, args, strict=False), *((k, v) for k, v in keywords.items() if k in fields)]:
                self._set(f"{name}.{field}", values)
            return frozenset({Own(name)})
        if not isinstance(definition, FUNCTIONS):
            return NOTHING
        bound = isinstance(self.defined.get(name.rpartition(".")[0]), ast.ClassDef) and not _is_static(definition)
        names = [a.arg for a in definition.args.posonlyargs + definition.args.args][bound:]
        for parameter, values in [*zip(names, args, strict=False), *((k, v) for k, v in keywords.items() if k)]:
            self._set(f"{name}.{parameter}", values)
        return self.values.get(f"{name}()", NOTHING)

    def _known_call(self, node: ast.Call, args: list[Values], keywords: dict[str | None, Values]) -> Values:
        """Of Python's own functions, and of others that call one of ours: to_thread(f, x), partial(f, x), Thread(target=f, args=(x,))."""
        name = ast.unparse(node.func)
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            return frozenset(chain.from_iterable(self._attribute(base, str(node.args[1].value), node) for base in args[0]))
        if name.endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            return self._imported(str(node.args[0].value), node)
        if name == "dict":
            known = frozenset((k.arg, _text(k.value)) for k in node.keywords if k.arg)
            return _merged(frozenset(chain(*args, *keywords.values())) | {Keys(known)})
        if name in ("zip", "enumerate", "map"):
            columns = [NOTHING, *args] if name == "enumerate" else args[name == "map" :]
            return self._called_later(args[0], columns) if name == "map" else frozenset({_several(columns)})
        if "target" in keywords:
            given = next((v for v in keywords.get("args", NOTHING) if isinstance(v, Several)), Several(()))
            return self._called_later(keywords["target"], list(given.parts))
        later = next((i for i, values in enumerate(args) if any(isinstance(v, Own) and self._is_function(v) for v in values)), None)
        if later is not None:
            return self._called_later(args[later], args[later + 1 :])
        return frozenset(chain(*args)) if name in COLLECTIONS else NOTHING

    def _called_later(self, callees: Values, args: list[Values]) -> Values:
        call = ast.parse("f()", mode="eval").body
        assert isinstance(call, ast.Call)
        return frozenset(chain.from_iterable(self._own_call(c.name, call, args, {}) for c in callees if isinstance(c, Own))) | frozenset(
            v for v in callees if isinstance(v, Own)
        )

    def _is_function(self, value: Own) -> bool:
        return isinstance(self.defined.get(value.name), FUNCTIONS)


def _canonical(key: str) -> str:
    """torch.npu is torch_npu.npu."""
    return f"torch_npu.npu{key.removeprefix('torch.npu')}" if key == "torch.npu" or key.startswith("torch.npu.") else key


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _merged(values: Values) -> Values:
    """The same with at most one dict."""
    dicts = [v for v in values if isinstance(v, Keys)]
    if len(dicts) < 2:
        return values
    whole = Keys(frozenset(chain.from_iterable(d.known for d in dicts)), any(d.open for d in dicts))
    return frozenset(v for v in values if not isinstance(v, Keys)) | {whole}


def _part(values: Values, index: int, width: int) -> Values:
    found: Values = NOTHING
    for value in values:
        if not isinstance(value, Several):
            found |= frozenset({value}) if not isinstance(value, Keys) else NOTHING
        elif len(value.parts) == width:
            found |= value.parts[index]
        else:
            found |= frozenset(chain.from_iterable(value.parts))
    return found


def _several(parts: Iterable[Values], depth: int = MOST_NESTED) -> Several:
    def cut(values: Values) -> Values:
        inner = [_several(v.parts, depth - 1) if depth else None for v in values if isinstance(v, Several)]
        return frozenset(v for v in values if not isinstance(v, Several)) | frozenset(filter(None, inner))

    return Several(tuple(map(cut, parts)))


def _parameters(node: Any) -> list[ast.arg]:
    args = node.args
    return [*args.posonlyargs, *args.args, *args.kwonlyargs]


def _is_static(node: Any) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)


def _is_property(node: ast.AST) -> bool:
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(n in ("property", "cached_property", "functools.cached_property") for n in names)
