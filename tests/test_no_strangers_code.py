"""No code of strangers: nothing here unpickles, evaluates, starts a shell or imports what a file names.

Every Python file of the three folders is read as a tree. What stands in `ALLOWED` says why it may.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import pytest
from test_structure import FOLDERS, sources

# Modules that unpickle, or run what they are given; `multiprocessing` pickles what it sends.
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "ruamel", "runpy",
    "code", "codeop", "imp", "commands", "multiprocessing", "xmlrpc", "kernels",
}  # fmt: skip
BUILT_IN = {"eval", "exec", "compile", "__import__", "execfile"}
# By their last name, of whatever they are attributes: what runs text, unpickles, or is given a class by a file.
CALLS = {
    "system", "popen", "spawnl", "spawnv", "execv", "execve", "execvp", "execl", "getoutput", "getstatusoutput",
    "create_subprocess_shell", "run_path", "run_module", "exec_module", "load_module", "import_module",
    "spec_from_file_location", "unsafe_load", "full_load", "load_with_torchcode", "load_state_dict_from_url",
    "get_class_from_dynamic_module", "get_cached_module_file", "allow_all_hub_kernels", "get_kernel", "kernelize",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
LOADS = {"torch", "jit", "pickle", "yaml", "joblib", "np", "numpy", "marshal", "dill", "hub", "_C"}
KEYWORDS = {"shell": (False,), "trust_remote_code": (False,), "allow_pickle": (False,), "weights_only": (True,)}

ALLOWED = {
    ("offload/__init__.py", "import_module"): "of the package's own names, from a table in the same file",
    ("offload/cli/libraries.py", "import_module"): "of libraries by constants",
    ("offload/cli/chat_input.py", "import_module"): "of readline, where there is one",
    ("bench/peers/child.py", "import_module"): "of one of the bench's own peers, which its parent names",
    ("offload/drafting/registry.py", "import_module"): "of the program's own drafters, from a table of constants",
    ("offload/cli/app.py", "import_module"): "of the program's own commands, from a table in the same file",
    ("bench/chat_pair/make.py", "import_module"): "of the standard library, from a table in the same file",
    ("bench/suite.py", "import_module"): "of the bench's own commands, from a table in the same file",
    ("bench/suite.py", "runpy"): "of the bench's own commands",
    ("bench/suite.py", "run_module"): "of the bench's own commands",
    ("offload/cli/launch.py", "multiprocessing"): "torchrun's own classes, whose name it is part of",
}


def breaches(path: PurePosixPath, source: str) -> Iterator[tuple[int, str]]:
    """Lines with what must not be there, and its name."""
    for node in ast.walk(ast.parse(source)):
        yield from ((node.lineno, name) for name in _imports(node) if isinstance(node, ast.stmt))
        if isinstance(node, ast.Call):
            yield from ((node.lineno, breach) for breach in _calls(node))
        if isinstance(node, ast.Dict):  # of arguments, by `**`
            pairs = zip(node.keys, node.values, strict=True)
            given = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
            yield from ((node.lineno, breach) for breach in _wrong(given))
        if isinstance(node, ast.Name) and node.id in BUILT_IN:  # also where it is handed on
            yield node.lineno, node.id


def _imports(node: ast.AST) -> Iterator[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
        yield from (alias.name for alias in node.names if alias.name in CALLS)
    for name in names:
        yield from sorted(MODULES & set(name.split("."))) if not name.startswith("offload.") else ()


def _calls(node: ast.Call) -> Iterator[str]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    named = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    if name in CALLS and not (name == "system" and named == "platform"):
        yield name
    if name == "load" and named in LOADS:
        yield f"{named}.load"
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    yield from _wrong(given)
    is_asking = "trust_remote_code" not in given and None not in given
    if name in ("from_pretrained", "from_config") and named.startswith("Auto") and is_asking:
        yield f"{name} without trust_remote_code=False, where transformers asks at the terminal"
    if name == "from_pretrained" and "For" in named and "use_safetensors" not in given:
        yield f"{name} without use_safetensors=True, which unpickles where there are no safetensors"


def _wrong(given: Mapping[Any, ast.expr]) -> Iterator[str]:
    for keyword, sound in KEYWORDS.items():
        value = given.get(keyword)
        if value is not None and not (isinstance(value, ast.Constant) and value.value in sound):
            yield f"{keyword}="


@pytest.mark.always
def test_no_file_runs_what_a_stranger_wrote() -> None:
    breaches_seen = [(str(path), line, breach) for path, source in sources() for line, breach in breaches(path, source)]
    wrong = [f"{path}:{line} {breach}" for path, line, breach in breaches_seen if (path, breach) not in ALLOWED]
    assert not wrong, "\n" + "\n".join(wrong)
    assert ALLOWED.keys() <= {(path, breach) for path, _, breach in breaches_seen}, "what is needed no more"
    assert {path.split("/")[0] for path, _ in ALLOWED} <= set(FOLDERS)


PLANTED = [
    "import pickle", "from pickle import loads", "import cloudpickle as json", "from yaml import load",
    "import torch.multiprocessing", "from os import system", "import multiprocessing.connection",
    "torch.load(path)", "torch.load(path, weights_only=True)", "torch.jit.load(path)", "np.load(path)",
    "numpy.load(path, allow_pickle=True)", "np.lib.format.read_array(f, allow_pickle=True)",
    "eval(text)", "exec(text)", "exec(compile(text, '', 'exec'))", "list(map(eval, texts))", "__import__(name)",
    "os.system(line)", "os.popen(line)", "subprocess.run(line, shell=True)", "subprocess.run(line, shell=is_shell)",
    "subprocess.getoutput(line)", "importlib.import_module(config['module'])", "runpy.run_path(path)",
    "spec_from_file_location('a', path)", "torch.hub.load(repo, name)", "dist.broadcast_object_list(told)",
    "AutoModel.from_pretrained(path)", "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
    "AutoConfig.from_pretrained(path, trust_remote_code=None)", "AutoModel.from_config(config)",
    "LlamaForCausalLM.from_pretrained(path)", "yaml.unsafe_load(text)", "yaml.load(text)",
    "AutoConfig.from_pretrained(path, **{'trust_remote_code': True})",
    "get_class_from_dynamic_module('a.B', path)", "from kernels import get_kernel",
]  # fmt: skip


@pytest.mark.parametrize("source", PLANTED)
def test_a_breach_is_found(source: str) -> None:
    assert list(breaches(PurePosixPath("offload/a.py"), source))


def test_good_code_passes() -> None:
    source = """
import json, re, subprocess
from offload.kernels import registry
from offload.bench.harness import code
subprocess.run([sys.executable, "-P", script], check=False)
json.load(file); self.load(path); pattern = re.compile("x"); model.eval(); np.frombuffer(raw)
AutoTokenizer.from_pretrained(path, trust_remote_code=False)
AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, use_safetensors=True)
platform.system()
"""
    assert not list(breaches(PurePosixPath("offload/a.py"), source))
