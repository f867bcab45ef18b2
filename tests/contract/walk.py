"""The walk over the syntax trees of all our modules: names, statements and expressions. Calls are in calls.py.

It is repeated until no name stands for anything new: a function may be called before, or in another module than, what it is given.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from itertools import chain, product
from typing import Any

from calls import FUNCTIONS, called, is_static, parameters, text_of
from uses import Use
from values import NOTHING, Foreign, Keys, Own, Several, Values, merged, part, several

LIBRARIES = ("vllm", "vllm_ascend", "torch_npu", "torch")
CLASS_PATH = re.compile(r"(vllm|vllm_ascend|torch_npu)(\.\w+)+")
EXTENSION = "worker_extension_cls"
WORKERS = ("vllm_ascend.worker.worker.NPUWorker", "vllm.v1.worker.gpu_worker.Worker")
"""Classes that vLLM puts our worker extension under."""
SCOPES = (*FUNCTIONS, ast.ClassDef)


class Walk:
    """State of the walk: what every name stands for, and the uses seen in the current pass."""

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
        """One pass over all modules."""
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

    def set(self, name: str, values: Iterable[Any]) -> None:
        """Let a full name ("pasync.device.pin.ids"; "..pin()" is what it returns) stand for these values too."""
        old = self.values.get(name, NOTHING)
        new = merged(old | frozenset(values))
        if new != old:
            self.values[name], self.changed = new, True

    def is_function(self, name: str) -> bool:
        """Whether a full name is that of a function of ours."""
        return isinstance(self.defined.get(name), FUNCTIONS)

    def constructors(self, name: str) -> list[str]:
        """Classes of libraries whose constructor a class of ours takes over."""
        definition = self.defined.get(name)
        own = f"{name}.__init__" in self.defined or not isinstance(definition, ast.ClassDef)
        return [] if own else [base.key for base in self.values.get(f"{name}<", NOTHING) if isinstance(base, Foreign)]

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

    def use(self, key: str, node: ast.AST, **more: Any) -> None:
        """Note a use."""
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
            value = self.value(node.value)
            for target in node.targets:
                self._bind(target, value)
        elif isinstance(node, ast.AnnAssign):
            annotated = self._annotation(node.annotation)
            self._bind(node.target, annotated | (self.value(node.value) if node.value else NOTHING))
        elif isinstance(node, ast.AugAssign):
            self._bind(node.target, self.value(node.value))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._bind_each(node.target, self.value(node.iter))
            self._body(node.body + node.orelse)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self.value(item.context_expr)
                if item.optional_vars:
                    self._bind(item.optional_vars, value)
            self._body(node.body)
        elif isinstance(node, ast.Return):
            self.set(f"{self.scope}()", self.value(node.value) if node.value else NOTHING)
        else:
            for child in ast.iter_child_nodes(node):
                self._any(child)

    def _any(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            self._statement(node)
        elif isinstance(node, ast.expr):
            self.value(node)
        else:  # except handlers, match cases
            for child in ast.iter_child_nodes(node):
                self._any(child)

    def _definition(self, node: Any) -> None:
        outer = self.scope
        for decorator in node.decorator_list:
            self.value(decorator)
        inner = f"{outer}.{node.name}"
        if isinstance(node, ast.ClassDef):
            bases = frozenset(chain.from_iterable(self.value(base) for base in node.bases))
            self.set(f"{inner}<", bases)
            methods = [m for m in node.body if isinstance(m, FUNCTIONS) and not m.name.startswith("__")]
            for base, method in product((b for b in bases if isinstance(b, Foreign)), methods):
                self.use(f"{base.key}.{method.name}", method, replaced_by=tuple(p.arg for p in parameters(method)[1:]))
        else:
            for value in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.value(value)
            for parameter in parameters(node):
                self.set(f"{inner}.{parameter.arg}", self._annotation(parameter.annotation))
            if node.returns:
                self.set(f"{inner}()", self._annotation(node.returns))
            if isinstance(self.defined.get(outer), ast.ClassDef) and not is_static(node) and parameters(node):
                self.set(f"{inner}.{parameters(node)[0].arg}", {Own(outer)})
        self.scope = inner
        self._body(node.body)
        self.scope = outer

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                origin = f"{node.module}.{alias.name}" if node.module else alias.name
                self.set(f"{self.scope}.{alias.asname or alias.name}", self.imported(origin, node))
            else:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                self.imported(alias.name, node)
                self.set(f"{self.scope}.{alias.asname or name}", self._named(name))

    def imported(self, origin: str, node: ast.AST) -> Values:
        if origin.split(".")[0] in LIBRARIES and origin != "torch":
            self.use(_canonical(origin), node)
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
            return self.value(node)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            return NOTHING  # its texts are no annotations
        parts = (node.left, node.right) if isinstance(node, ast.BinOp) else ast.iter_child_nodes(node) if node else ()
        return frozenset(chain.from_iterable(self._annotation(p) for p in parts if isinstance(p, ast.expr)))

    def _bind(self, target: ast.expr, values: Values) -> None:
        if isinstance(target, ast.Name):
            self.set(f"{self.scope}.{target.id}", values)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for i, element in enumerate(target.elts):
                self._bind(element.value if isinstance(element, ast.Starred) else element, part(values, i, len(target.elts)))
        elif isinstance(target, ast.Attribute):
            for base in self.value(target.value):
                if isinstance(base, Own):
                    self.set(f"{base.name}.{target.attr}", values)
                elif isinstance(base, Foreign):
                    ours = [self.defined.get(v.name) for v in values if isinstance(v, Own)]
                    names = [tuple(p.arg for p in parameters(f)) for f in ours if isinstance(f, FUNCTIONS)]
                    self.use(_canonical(f"{base.key}.{target.attr}"), target, replaced_by=names[0] if names else None)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, (ast.Name, ast.Attribute)):
            self.value(target.slice)
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

    def value(self, node: ast.expr) -> Values:
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method:
            return method(node)
        inner = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        passes_on = isinstance(node, (ast.Await, ast.Starred, ast.IfExp, ast.BoolOp, ast.BinOp, ast.List, ast.Set))
        return frozenset(chain.from_iterable(inner)) if passes_on else NOTHING

    def _of_constant(self, node: ast.Constant) -> Values:
        if isinstance(node.value, str) and CLASS_PATH.fullmatch(node.value):
            self.use(node.value, node)
        return NOTHING

    def _of_name(self, node: ast.Name) -> Values:
        return self._look_up(node.id)

    def _of_tuple(self, node: ast.Tuple) -> Values:
        return frozenset({several([self.value(element) for element in node.elts])})

    def _of_dict(self, node: ast.Dict) -> Values:
        found: Values = NOTHING
        for key, value in zip(node.keys, node.values, strict=True):
            values = self.value(value)
            if key is None:
                found |= values if any(isinstance(v, Keys) for v in values) else values | {Keys(frozenset(), True)}
            else:
                self.value(key)
                known = isinstance(key, ast.Constant) and isinstance(key.value, str)
                found |= values - {v for v in values if isinstance(v, Keys)}
                found |= {Keys(frozenset({(key.value, text_of(value))})) if known else Keys(frozenset(), True)}  # type: ignore[attr-defined]
        return merged(found | {Keys(frozenset())})

    def _of_dictcomp(self, node: ast.DictComp) -> Values:
        self._generators(node.generators)
        self.value(node.key)
        return self.value(node.value) | {Keys(frozenset(), True)}

    def _of_listcomp(self, node: Any) -> Values:
        self._generators(node.generators)
        return self.value(node.elt)

    _of_setcomp = _of_generatorexp = _of_listcomp

    def _generators(self, generators: list[ast.comprehension]) -> None:
        for generator in generators:
            self._bind_each(generator.target, self.value(generator.iter))
            for condition in generator.ifs:
                self.value(condition)

    def _of_namedexpr(self, node: ast.NamedExpr) -> Values:
        value = self.value(node.value)
        self._bind(node.target, value)
        return value

    def _of_lambda(self, node: ast.Lambda) -> Values:
        return self.value(node.body)

    def _of_yield(self, node: ast.Yield) -> Values:
        self.set(f"{self.scope}()", self.value(node.value) if node.value else NOTHING)
        return NOTHING

    def _of_yieldfrom(self, node: ast.YieldFrom) -> Values:
        self.set(f"{self.scope}()", self.value(node.value))
        return NOTHING

    def _of_subscript(self, node: ast.Subscript) -> Values:
        values = self.value(node.value)
        self.value(node.slice)
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
        return frozenset(chain.from_iterable(self.attribute(base, node.attr, node) for base in self.value(node.value)))

    def attribute(self, base: Any, name: str, node: ast.AST) -> Values:
        if isinstance(base, Foreign):
            key = _canonical(f"{base.key}.{name}")
            self.use(key, node)
            return frozenset({Foreign(self.gives(key) or key)})
        if not isinstance(base, Own):
            return NOTHING
        full = f"{base.name}.{name}"
        if full in self.defined:
            return self.values.get(f"{full}()", NOTHING) if _is_property(self.defined[full]) else frozenset({Own(full)})
        if full in self.values:
            return self.values[full]
        above = self.values.get(f"{base.name}<", NOTHING) | ({Foreign(w) for w in WORKERS} if base.name in self.extensions else NOTHING)
        return frozenset(chain.from_iterable(self.attribute(parent, name, node) for parent in above))

    def _of_call(self, node: ast.Call) -> Values:
        return called(self, node)


def _canonical(key: str) -> str:
    """torch.npu is torch_npu.npu."""
    return f"torch_npu.npu{key.removeprefix('torch.npu')}" if key == "torch.npu" or key.startswith("torch.npu.") else key


def _is_property(node: ast.AST) -> bool:
    names = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(n in ("property", "cached_property", "functools.cached_property") for n in names)
