"""Calls, for walk.py: of a library they are uses, of our own functions they carry values in and out."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from uses import Call
from values import NOTHING, Foreign, Keys, Own, Several, Values, merged, several

if TYPE_CHECKING:
    from walk import Walk

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COLLECTIONS = ("list", "tuple", "set", "iter", "next", "sorted", "reversed", "deque", "cast")
Keywords = dict[str | None, Values]


def called(walk: Walk, node: ast.Call) -> Values:
    """What a call returns."""
    callees = walk.value(node.func)
    args = [walk.value(a) for a in node.args]
    keywords = {k.arg: walk.value(k.value) for k in node.keywords}
    found: Values = NOTHING
    for callee in callees:
        if isinstance(callee, Foreign):
            found |= _foreign_call(walk, callee.key, node, args)
        elif isinstance(callee, Own):
            found |= _own_call(walk, callee.name, *_spread(node, args), keywords)
            for base in walk.constructors(callee.name):
                _foreign_call(walk, base, node, args)
    return found if any(isinstance(c, Own) for c in callees) else found | _python_call(walk, node, args, keywords)


def _foreign_call(walk: Walk, key: str, node: ast.Call, args: list[Values]) -> Values:
    if key == "torch.get_device_module":
        return frozenset({Foreign("torch_npu.npu")})
    if key.startswith("torch.") and not key.startswith("torch.ops.npu."):
        return NOTHING
    positional, rest = _spread(node, args)
    problem = "unpacks a list of unknown length" if rest is not None else ""
    known = {(k.arg, text_of(k.value)) for k in node.keywords if k.arg}
    for unpacked in (k.value for k in node.keywords if k.arg is None):
        dicts = [v for v in walk.value(unpacked) if isinstance(v, Keys)]
        problem = "unpacks a dict of unknown keys" if not dicts or any(d.open for d in dicts) else problem
        known.update(*(d.known for d in dicts))
    texts = frozenset((name, text) for name, text in known if text is not None)
    walk.use(key, node, call=Call(len(positional), frozenset(name for name, _ in known), texts), problem=problem)
    gives = walk.gives(f"{key}()")
    return frozenset({Foreign(gives)}) if gives else NOTHING


def _own_call(walk: Walk, name: str, args: list[Values], rest: Values | None, keywords: Keywords) -> Values:
    definition = walk.defined.get(name)
    if isinstance(definition, ast.ClassDef):
        if f"{name}.__init__" in walk.defined:
            _own_call(walk, f"{name}.__init__", args, rest, keywords)
        fields = [s.target.id for s in definition.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        _pass(walk, name, fields, args, rest, keywords)
        return frozenset({Own(name)})
    if not isinstance(definition, FUNCTIONS):
        return NOTHING
    is_method = isinstance(walk.defined.get(name.rpartition(".")[0]), ast.ClassDef) and not is_static(definition)
    names = [a.arg for a in parameters(definition)][is_method:]
    _pass(walk, name, names, args, rest, keywords)
    return walk.values.get(f"{name}()", NOTHING)


def _pass(walk: Walk, scope: str, names: list[str], args: list[Values], rest: Values | None, keywords: Keywords) -> None:
    """Give arguments to parameters; what stands for an unknown number of them to all."""
    for i, name in enumerate(names):
        given = args[i] if i < len(args) else keywords.get(name, NOTHING)
        walk.set(f"{scope}.{name}", given | (rest or NOTHING) | keywords.get(None, NOTHING))


def _python_call(walk: Walk, node: ast.Call, args: list[Values], keywords: Keywords) -> Values:
    """Of Python's own functions, and of others that call one of ours: to_thread(f, x), partial(f, x), Thread(target=f, args=(x,))."""
    name = ast.unparse(node.func)
    second = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
    if name == "getattr" and second is not None:
        return frozenset(chain.from_iterable(walk.attribute(base, str(second), node) for base in args[0]))
    if name.endswith("import_module") and node.args and (module := text_of(node.args[0])):
        return walk.imported(module, node)
    if name == "dict":
        return merged(_all(args) | _all(keywords.values()) | {Keys(frozenset((k.arg, text_of(k.value)) for k in node.keywords if k.arg))})
    if name in ("zip", "enumerate"):
        return frozenset({several([NOTHING, *args] if name == "enumerate" else args)})
    if "target" in keywords:
        given = next((v for v in keywords.get("args", NOTHING) if isinstance(v, Several)), Several(()))
        return _called_later(walk, keywords["target"], list(given.parts))
    ours = [i for i, values in enumerate(args) if any(isinstance(v, Own) and walk.is_function(v.name) for v in values)]
    if ours:
        return _called_later(walk, args[ours[0]], args[ours[0] + 1 :])
    return _all(args) if name in COLLECTIONS else NOTHING


def _called_later(walk: Walk, callees: Values, args: list[Values]) -> Values:
    """What our functions return when they are called with these arguments, and the functions, for who calls them yet."""
    ours = frozenset(c for c in callees if isinstance(c, Own))
    return ours | _all(_own_call(walk, c.name, args, None, {}) for c in ours)


def _spread(node: ast.Call, args: list[Values]) -> tuple[list[Values], Values | None]:
    """(positional arguments, what stands for an unknown number of further ones or None)."""
    spread, rest = list[Values](), None
    for given, values in zip(node.args, args, strict=True):
        tuples = [v for v in values if isinstance(v, Several)]
        if not isinstance(given, ast.Starred):
            spread.append(values)
        elif len(tuples) == 1:
            spread += tuples[0].parts
        else:
            rest = (rest or NOTHING) | values
    return spread, rest


def _all(values: Iterable[Values]) -> Values:
    return frozenset(chain.from_iterable(values))


def text_of(node: ast.expr) -> str | None:
    """A constant string."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def parameters(node: Any) -> list[ast.arg]:
    """Of a function, positional ones first."""
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def is_static(node: Any) -> bool:
    """Whether a function takes no self."""
    return any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
