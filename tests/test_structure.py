"""House rules as tests: each rule reads one source file and yields `path:line rule` for every breach.

Why: a rule that is not run is a wish. Invariant: for each rule there is a planted breach below that it must report.
"""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("offload", "kernels", "bench")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_IMPORTS = 15
MAX_POSITIONAL = 6
MAX_PARAMETERS = 8
MOVED = {"past_key_values", "cache_params"}
LIBRARY = PurePosixPath("offload/model/library.py")
# Small, public, older than the oldest version that is admitted, or `transformers.__version__` alone.
ASK_TRANSFORMERS = {PurePosixPath(f"offload/{name}.py") for name in (
    "checkpoint/small_files", "engine/load", "engine/text_stream", "engine/tokenizer", "guarded_worker", "model/meta",
    "sampling/model_rules", "sampling/sampler")}  # fmt: skip
EMPTY_NAMES = {"one", "own", "told", "what", "found", "how", "more"}
PERSONS = re.compile(r"\b(?:whoever|whomever|nobody|somebody)\b", re.IGNORECASE)

# A docstring names what is returned: a number, a path, `True if ...`.
VAGUE = re.compile(r"returns? (?:what|whether|how)\b")
TWICE_READ = re.compile(r"\b(?:so many|but for|anew|that there is not)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[PurePosixPath, str], Iterator[str]]


def short_files(path: PurePosixPath, source: str) -> Iterator[str]:
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:{num_lines} a file has at most {MAX_FILE_LINES} lines"


def short_functions(path: PurePosixPath, source: str) -> Iterator[str]:
    """Whole, from `def` to the last line; a kernel is one piece of arithmetic."""
    for function in functions(source) if path.parts[0] != "kernels" else ():
        num_lines = (function.end_lineno or 0) - function.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{path}:{function.lineno} {function.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"


def few_imports(path: PurePosixPath, source: str) -> Iterator[str]:
    """Modules of the house, in one file: what knows more rooms decides what others should."""
    if path.parts[0] == "kernels":
        return
    rooms = {name for node in nodes(source) for name in modules_of(node) if name.startswith("offload.")}
    if len(rooms) > MAX_IMPORTS:
        yield f"{path}:1 imports {len(rooms)} modules of the house, at most {MAX_IMPORTS}"


def nothing_packed(path: PurePosixPath, source: str) -> Iterator[str]:
    """One statement a line: no tuple of names is given a tuple of values, unless names change places."""
    if path.parts[0] != "offload":
        return
    for node in nodes(source):
        pair = (node.targets[0], node.value) if isinstance(node, ast.Assign) else ()
        elements = [{*map(ast.unparse, side.elts)} for side in pair if isinstance(side, ast.Tuple)]
        if len(elements) == 2 and elements[0] != elements[1]:
            yield f"{path}:{node.lineno} unrelated values are packed into one assignment"


def few_parameters(path: PurePosixPath, source: str) -> Iterator[str]:
    """A kernel takes its sizes one by one, and a bench its flags.

    Options are records, and what is called with the fields of one has its signature made of it.
    """
    for function in functions(source):
        positional = [a.arg for a in function.args.posonlyargs + function.args.args if a.arg not in ("self", "cls")]
        num_in_all = len(positional) + len(function.args.kwonlyargs)
        is_kernel = bool(decorators(function) & {"compiled", "jit"})
        is_bench = path.parts[0] == "bench" and "command" in decorators(function)
        if is_kernel or is_bench:
            continue
        if len(positional) > MAX_POSITIONAL or num_in_all > MAX_PARAMETERS:
            counts = f"{len(positional)} positional parameters and {num_in_all} in all"
            yield f"{path}:{function.lineno} {function.name} takes {counts}, at most {MAX_POSITIONAL}, {MAX_PARAMETERS}"


def nothing_swallowed(path: PurePosixPath, source: str) -> Iterator[str]:
    for node in nodes(source):
        is_handler = isinstance(node, ast.ExceptHandler) and catches_everything(node.type) and does_nothing(node.body)
        is_suppress = isinstance(node, ast.Call) and last_name(node.func) == "suppress"
        if is_handler or (is_suppress and any(map(catches_everything, node.args))):
            yield f"{path}:{node.lineno} an exception of any kind is swallowed"


def named_by_its_job(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.name.startswith("utils"):
        yield f"{path}:1 a file is named by its job, and utils is none"


def docstrings(path: PurePosixPath, source: str) -> Iterator[str]:
    """Modules in offload/ have one, with their public functions, classes and methods; a property's name may suffice."""
    if path.parts[0] != "offload":
        return
    module = parsed(source)
    if ast.get_docstring(module) is None:
        yield f"{path}:1 the module has no docstring"
    for node, name in public_definitions(module):
        if ast.get_docstring(node) is None:
            yield f"{path}:{node.lineno} {name} has no docstring"


def plain_words(path: PurePosixPath, source: str) -> Iterator[str]:
    """A docstring has a subject and a verb, and no person whom no one knows."""
    for node in nodes(source):
        is_told = isinstance(node, ast.Module | ast.ClassDef | Function) and bool(node.body)
        words = (ast.get_docstring(node) or "").lower() if is_told else ""
        if words.startswith(("of ", "of,", "the same ", "the same,")) or VAGUE.match(words):
            yield f"{path}:{getattr(node, 'lineno', 1)} a docstring begins with {' '.join(words.split()[:2])}"
        if match := TWICE_READ.search(words):
            yield f"{path}:{getattr(node, 'lineno', 1)} the words {match[0]!r} are understood when read twice"
    for number, line in enumerate(source.splitlines(), 1):
        if match := PERSONS.search(line):
            yield f"{path}:{number} {match[0]} is no subject"


def plain_names(path: PurePosixPath, source: str) -> Iterator[str]:
    """A name says what the thing is: `layer`, `header`, `complaint`; these say nothing of it."""
    for node in nodes(source):
        is_bound = isinstance(getattr(node, "ctx", None), ast.Store)
        given = [getattr(node, "arg", None)] if isinstance(node, ast.arg) else []
        given += [getattr(node, field, None) for field in ("id", "attr")] if is_bound else []
        if isinstance(node, Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.alias):
            given += [getattr(node, "asname", None), getattr(node, "name", None)]
        given += [node.rest] if isinstance(node, ast.MatchMapping) else []
        for name in EMPTY_NAMES.intersection(given):
            yield f"{path}:{getattr(node, 'lineno', 1)} {name} is a name that says nothing of its thing"
        if isinstance(node, ast.ClassDef) and "of" in {getattr(child, "name", "") for child in node.body}:
            yield f"{path}:{node.lineno} {node.name}.of does not say what it makes of what: from_..., parse"


def no_package_at_top_level(path: PurePosixPath, source: str) -> Iterator[str]:
    if path.parts[0] in ("kernels", "bench") and path.name == "__init__.py":
        yield f"{path}:1 {path.parts[0]}/ is no package: it would shadow Hugging Face's kernels, or another bench"


def kernels_stand_alone(path: PurePosixPath, source: str) -> Iterator[str]:
    """The import contract ends at `offload.kernels`, for the files themselves lie outside the package."""
    if path.parts[0] != "kernels":
        return
    for node in nodes(source):
        for name in imported_names(node):
            if f"{name}.".startswith("offload.") and not f"{name}.".startswith("offload.kernels."):
                yield f"{path}:{node.lineno} a kernel imports {name}: kernels/ stands at the bottom"


def one_file_knows_the_library(path: PurePosixPath, source: str) -> Iterator[str]:
    """What transformers may rename between minor versions is named in `model/library.py` alone."""
    if path.parts[0] != "offload" or path == LIBRARY:
        return
    for node in nodes(source):
        name = getattr(node, "value" if isinstance(node, ast.Constant) else "arg", None)
        if isinstance(name, str) and name in MOVED:
            yield f"{path}:{node.lineno} a name of transformers that moves: take it from {LIBRARY}"
        for name in imported_names(node) if path not in ASK_TRANSFORMERS else ():
            if f"{name}.".startswith("transformers."):
                yield f"{path}:{node.lineno} imports {name}: take it from {LIBRARY}"


def library_left_alone(path: PurePosixPath, source: str) -> Iterator[str]:
    """A library's code is called by public names: not cloned, inspected, given another class or other methods.

    Its names that may move stand in one file, which `test_the_library_is_patched_in_three_places_at_most` counts.
    """
    if path.parts[0] == "offload" and path != LIBRARY:
        yield from patches(path, source)


def patches(path: PurePosixPath, source: str) -> Iterator[str]:
    for node in nodes(source):
        targets = node.targets if isinstance(node, ast.Assign) else []
        written = {target.attr for target in targets if isinstance(target, ast.Attribute)}
        written |= {key.value for target in targets if isinstance(key := getattr(target, "slice", None), ast.Constant)}
        seen = {getattr(node, name, None) for name in ("id", "attr", "name")}
        if written & {"__class__", "forward"} or seen & {"FunctionType", "TorchFunctionMode", "__code__"}:
            yield f"{path}:{getattr(node, 'lineno', 1)} code of a library is patched or looked into"


RULES: list[Rule] = [short_files, short_functions, few_imports, nothing_packed, few_parameters, nothing_swallowed]
RULES += [named_by_its_job, docstrings, plain_words, no_package_at_top_level, kernels_stand_alone]
RULES += [one_file_knows_the_library]
RULES += [library_left_alone, plain_names]


@pytest.fixture(scope="module", autouse=True)
def _forgotten_afterwards() -> Iterator[None]:
    yield
    nodes.cache_clear()
    parsed.cache_clear()


@pytest.mark.always
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    breaches = [breach for path, source in sources() for breach in rule(path, source)]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.always
def test_the_library_is_patched_in_three_places_at_most() -> None:
    assert len([*patches(LIBRARY, (ROOT / LIBRARY).read_text(encoding="utf-8"))]) <= 3


@pytest.mark.always
def test_tests_are_told_in_plain_words() -> None:
    """Their text alone is looked at, which is quicker than their trees; this file has the breaches."""
    words = re.compile(rf'"""(?:of|the same)\b|{PERSONS.pattern}', re.IGNORECASE)
    vague = re.compile(rf'"""(?:{VAGUE.pattern}|(?=\S)[^"]*{TWICE_READ.pattern})', re.IGNORECASE)
    breaches = list[str]()
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    for path in files:
        text = path.read_text(encoding="utf-8")
        breaches += [f"{path}: {match[0]}" for rule in (words, vague) if (match := rule.search(text))]
    assert len(files) > 200 and breaches == []


@pytest.mark.always
def test_names_in_tests_say_what_their_things_are() -> None:
    """Only a file whose text may bind such a name is parsed."""
    may_bind = re.compile(rf"\b(?:{'|'.join(EMPTY_NAMES)})\b *(?:[=:,)]|in\b)")
    breaches = list[str]()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place = PurePosixPath(path.relative_to(ROOT).as_posix())
        source = path.read_text(encoding="utf-8")
        if may_bind.search(source):
            breaches += [line for line in plain_names(place, source) if "says nothing of its thing" in line]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.always
def test_a_class_name_means_one_thing() -> None:
    """In the product; the bench measures it with records of its own."""
    homes: dict[str, list[str]] = {}
    for path, source in sources():
        if path.parts[0] == "bench":
            continue
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    """Their folders are no packages: of two modules with one name pytest imports the first for both, and stops."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "__main__.py"]  # not imported
    assert sorted(names) == sorted(set(names))


def test_every_rule_has_a_planted_breach() -> None:
    assert {breach.values[0] for breach in PLANTED} == set(RULES)


def planted(rule: Rule, path: str, source: str, case: str = "") -> object:
    return pytest.param(rule, PurePosixPath(path), source, id=f"{rule.__name__}-{case}".strip("-"))


PLANTED = [
    planted(library_left_alone, "offload/a.py", "module.forward = partial(other, module)", "forward"),
    planted(short_files, "offload/a.py", "x = 1\n" * 601),
    planted(short_functions, "offload/a.py", "def f():\n" + "    x = 1\n" * 61),
    planted(few_imports, "offload/a.py", "".join(f"from offload.room{num} import x\n" for num in range(16))),
    planted(nothing_packed, "offload/cli/a.py", "first, other = 1, [2]"),
    planted(few_parameters, "offload/a.py", "def f(a, b, c, d, e, f, g): ...", "positional"),
    planted(nothing_swallowed, "offload/a.py", "try: f()\nexcept: pass", "bare"),
    planted(named_by_its_job, "bench/utils_io.py", "x = 1\n"),
    planted(docstrings, "offload/a.py", "x = 1", "module"),
    planted(plain_words, "offload/a.py", "'''Of a layer.'''", "of"),
    planted(plain_names, "offload/a.py", "totals = [one + 1 for one in sizes]", "loop"),
    planted(no_package_at_top_level, "kernels/__init__.py", ""),
    planted(one_file_knows_the_library, "offload/a.py", "run(past_key_values=cache)", "argument"),
    planted(kernels_stand_alone, "kernels/a.py", "from offload.units import Config", "from"),
]


@pytest.mark.parametrize(("rule", "path", "source"), PLANTED)
def test_rule_can_fail(rule: Rule, path: PurePosixPath, source: str) -> None:
    (breach,) = rule(path, source)
    assert re.match(rf"{re.escape(str(path))}:\d+ \w", breach)


def sources() -> Iterator[tuple[PurePosixPath, str]]:
    """Every Python file of the three folders as it lies on disk, committed or not."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8")


@cache
def parsed(source: str) -> ast.Module:
    """Once for all rules."""
    return ast.parse(source)


@cache
def nodes(source: str) -> list[ast.AST]:
    return [*ast.walk(parsed(source))]


def functions(source: str) -> Iterator[Function]:
    return (node for node in nodes(source) if isinstance(node, Function))


def decorators(function: Function) -> set[str]:
    return {last_name(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}


def last_name(node: ast.AST | None) -> str:
    """`c` of `a.b.c`; empty for what has no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def catches_everything(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(map(catches_everything, node.elts))
    return node is None or last_name(node) in ("Exception", "BaseException")


def does_nothing(body: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


def public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[tuple[Function | ast.ClassDef, str]]:
    """Functions and classes without a leading underscore, also within such classes, but not within functions."""
    for child in node.body:
        if not isinstance(child, Function | ast.ClassDef) or child.name.startswith("_"):
            continue
        if isinstance(child, ast.ClassDef):
            yield from public_definitions(child)
        elif decorators(child) & {"property", "cached_property", "overload", "setter"}:
            continue
        yield child, child.name


def modules_of(node: ast.AST) -> list[str]:
    """Modules that a statement imports: `from offload.a import b` names offload.a, or b where that is a folder."""
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    if (ROOT / node.module.replace(".", "/")).is_dir():
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [node.module]


def imported_names(node: ast.AST) -> list[str]:
    """Full names: `from offload import config` gives offload.units."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
