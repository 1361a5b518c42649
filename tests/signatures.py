"""Calls of our code held against the signatures of packages that are not installed: read from their syntax trees."""

import ast
import functools
import inspect
from dataclasses import dataclass
from pathlib import Path

EMPTY, P = inspect.Parameter.empty, inspect.Parameter
VALUE = ast.Pass()  # something of which nothing more is known
# What ray.remote puts between a decorated class and its methods.
RAY = (".__ray_metadata__.modified_class", ".__ray_metadata__", ".__ray_actor_class__")


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    """All of a file's nodes: of ours, which are held against two generations of packages."""
    return [*ast.walk(tree(file))]


@dataclass(frozen=True)
class Packages:
    """Folders with packages, in which names are looked up: ``vllm.LLM`` follows the imports of vllm/__init__.py."""

    folders: tuple[Path, ...]

    def file(self, module: str) -> Path | None:
        parts = module.split(".")
        for folder in self.folders:
            for path in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts).with_suffix(".py")):
                if path.is_file():
                    return path
        return None

    @functools.cache  # noqa: B019  (two of them, for all tests)
    def find(self, name: str, seen: frozenset = frozenset()) -> tuple[str, ast.AST] | None:
        """The module and the node (class, function, assignment, module) that the dotted ``name`` stands for."""
        if name in seen:
            return None
        if file := self.file(name):
            return name, tree(file)
        owner, _, last = name.rpartition(".")
        if not owner or not (found := self.find(owner, seen | {name})):
            return None
        module, node = found
        if isinstance(node, ast.ClassDef):
            for base in self.classes(module, node):
                for item in base[1].body:
                    if getattr(item, "name", None) == last:
                        return base[0], item
                    if last in _targets(item):
                        return base[0], VALUE
            return None
        if not isinstance(node, ast.Module):  # an attribute of a function or a value
            return module, VALUE
        for item in _statements(node.body):
            if getattr(item, "name", None) == last or last in _targets(item):
                return module, item
            for alias in getattr(item, "names", ()) if isinstance(item, ast.Import | ast.ImportFrom) else ():
                if (alias.asname or alias.name) == last:
                    source = self._absolute(module, item) if isinstance(item, ast.ImportFrom) else ""
                    return self.find(f"{source}.{alias.name}".strip("."), seen | {name})
        return None

    def _absolute(self, module: str, item: ast.ImportFrom) -> str:
        if not item.level:
            return item.module or ""
        parts = module.split(".")
        own = parts if self.file(module).name == "__init__.py" else parts[:-1]
        return ".".join([*own[: len(own) - item.level + 1], *([item.module] if item.module else [])])

    def classes(self, module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """The class and those that it inherits from, as far as they are in the packages."""
        found = [(module, node)]
        for base in node.bases:
            other = self.find(f"{module}.{ast.unparse(base)}")
            if other and isinstance(other[1], ast.ClassDef):
                found += self.classes(*other)
        return found

    def source(self, name: str) -> str | None:
        for word in RAY:
            name = name.replace(word, "")
        if not (found := self.find(name)):
            return None
        module, node = found
        lines = self.file(module).read_text().splitlines()
        return "\n".join(lines[node.lineno - 1 : node.end_lineno])

    def signature(self, name: str) -> inspect.Signature | None:
        """Of a function, or of a class: its __init__, or its annotated fields. None where it is neither."""
        found = self.find(name)
        if not found:
            return None
        module, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(ast.unparse(word).startswith("hydra.main") for word in node.decorator_list):
                return None  # hydra gives it its config
            method = "." in name and isinstance((self.find(name.rpartition(".")[0]) or (0, 0))[1], ast.ClassDef)
            static = _is_static(node)
            first = next(iter([*node.args.posonlyargs, *node.args.args]), None)
            bound = method and not static and first is not None and first.arg in ("self", "cls")
            return _of_function(node, skip=bound)
        if not isinstance(node, ast.ClassDef):
            return None
        fields = {}
        for _, base in self.classes(module, node):
            for item in base.body:
                if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                    return _of_function(item, skip=True)
                if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
                    default = EMPTY if item.value is None else item.value
                    fields.setdefault(item.target.id, P(item.target.id, P.KEYWORD_ONLY, default=default))
        return inspect.Signature(fields.values()) if fields else None


def _targets(item: ast.AST) -> set[str]:
    """The names that a statement assigns, in a class body also those of ``self`` in its methods."""
    targets = item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
    names = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    if isinstance(item, ast.FunctionDef):
        for node in ast.walk(item):
            own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if own and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return names


def _statements(body: list[ast.stmt]):
    """Also those under an if or try at the top of a module (TYPE_CHECKING)."""
    for item in body:
        yield item
        for part in ("body", "orelse", "handlers", "finalbody") if isinstance(item, ast.If | ast.Try) else ():
            yield from _statements([b for h in getattr(item, part, []) for b in getattr(h, "body", [h])])


def _is_static(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(word) == "staticmethod" for word in node.decorator_list)


def _of_function(node: ast.FunctionDef, skip: bool) -> inspect.Signature:
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [EMPTY] * (len(positional) - len(a.defaults)) + a.defaults
    parameters = [P(arg.arg, P.POSITIONAL_OR_KEYWORD, default=d) for arg, d in zip(positional, defaults, strict=True)]
    parameters = parameters[1:] if skip else parameters
    parameters += [P(a.vararg.arg, P.VAR_POSITIONAL)] if a.vararg else []
    for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        parameters.append(P(arg.arg, P.KEYWORD_ONLY, default=EMPTY if default is None else default))
    return inspect.Signature(parameters + ([P(a.kwarg.arg, P.VAR_KEYWORD)] if a.kwarg else []))


# ---- our side


@dataclass(frozen=True)
class Known:
    """What a syntax tree does not tell: the class behind an expression, and where a ``**kwargs`` of theirs ends."""

    instances: dict[str, str]
    forwards: dict[str, str]
    handed_on: tuple[str, ...]  # what is spread in a call (`**kwargs`) as it came
    packages: tuple[str, ...] = ("verl", "vllm", "trl")  # the calls into these are looked at


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def problems(file: Path, packages: Packages, known: Known) -> list[str]:
    """What of the file's calls, names, overridden methods and expected lines the packages do not have."""
    found = []
    imported = dict(known.instances)
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
            imported |= {
                short: alias.name if alias.asname else short
                for short, alias in names.items()
                if alias.name.partition(".")[0] in known.packages
            }
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] in known.packages:
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    heads = sorted(imported, key=len, reverse=True)

    def theirs(node: ast.AST) -> str:
        """The full name of what ``node`` stands for in a package; empty if it is not theirs."""
        text = _dotted(node)
        for word in RAY:
            text = text.replace(word, "")
        head = next((head for head in heads if f"{text}.".startswith(f"{head}.")), "")
        return imported[head] + text.removeprefix(head) if head else ""

    def say(node: ast.AST, text: str) -> None:
        found.append(f"{file.name}:{node.lineno}: {text}")

    def bind(call: ast.Call, name: str) -> None:
        spread = [ast.unparse(a.value) for a in call.args if isinstance(a, ast.Starred)]
        spread += [ast.unparse(k.value) for k in call.keywords if k.arg is None]
        if spread:
            if not {*spread} <= {*known.handed_on}:
                say(call, f"{name}: {', '.join(spread)} hides what is handed over; write it out")
            return
        signature = packages.signature(name)
        if signature is None:
            return
        keywords = {k.arg: k.value for k in call.keywords}
        try:
            signature.bind(*call.args, **keywords)
        except TypeError as error:
            say(call, f"{name}: {error}")
        if forwarded := known.forwards.get(name):
            more = packages.signature(forwarded).parameters
            for unknown in [k for k in keywords if k not in signature.parameters and k not in more]:
                say(call, f"{name}: {forwarded} has no {unknown}")

    for node in nodes(file):
        if isinstance(node, ast.Name | ast.Attribute) and (name := theirs(node)) and not packages.find(name):
            say(node, f"{name}: there is no such name")
        if isinstance(node, ast.Call):
            if name := theirs(node.func):
                bind(node, name)
            if _dotted(node.func) == "expect" and node.args and (name := theirs(node.args[0])):
                source = packages.source(name) or ""
                for line in node.args[1:]:
                    if isinstance(line, ast.Constant) and line.value not in source:
                        say(node, f"{name}: no longer has `{line.value}`")
        if isinstance(node, ast.ClassDef):
            found_bases = [*map(theirs, node.bases)]
            for base in filter(None, found_bases):
                _check_class(node, base, all(found_bases), packages, bind, say)
    return sorted(set(found))


def _check_class(node: ast.ClassDef, base: str, alone: bool, packages: Packages, bind, say) -> None:
    """Our methods take what theirs of the same name take; what is called on self, or on super() of a class that has
    bases of theirs ``alone``, is there."""
    own = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (signature := packages.signature(f"{base}.{item.name}")) and item.name != "__init__":
            ours = _of_function(item, skip=not _is_static(item)).parameters.values()
            kinds = {p.kind for p in ours}
            if not {P.VAR_POSITIONAL, P.VAR_KEYWORD} & kinds:
                missing = set(signature.parameters) - {p.name for p in ours}
                if missing - {p.name for p in signature.parameters.values() if p.kind == P.VAR_KEYWORD}:
                    say(item, f"{base}.{item.name} takes {', '.join(sorted(missing))} too")
        for call in (call for call in ast.walk(item) if isinstance(call, ast.Call)):
            text = ast.unparse(call.func)
            for prefix in ("super().", "self."):
                name = text.removeprefix(prefix)
                if text.startswith(prefix) and name.isidentifier() and (prefix == "super()." or name not in own):
                    if packages.find(f"{base}.{name}"):
                        bind(call, f"{base}.{name}")
                    elif alone and prefix == "super()." and name != "__init__":
                        say(call, f"{base} has no {name}")
