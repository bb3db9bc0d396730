"""Do a job with what strangers have written: `python -P guarded_worker.py JOB`, a request and an
answer per line.

A request is JSON, what the job takes (`render`: what transformers' `render_jinja_template` does;
`compile`: a grammar's `source`), with `most_s` of processor time and `most_chars`. An answer is JSON
with `text` (of `compile` what is wrong with the grammar, if anything), or what has `failed`, or which
limit was `exceeded`. Invariant: nothing of the package is imported, and of transformers its sandbox
alone, so that it is there in 0.3 s and 40 MB; and the kernel ends this process once a request has
computed for longer than it may, whatever waits for it.
"""

import json
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from importlib.util import find_spec

# Memory beside what the process takes before its first request.
_MEMORY_BYTES = 512 << 20
# A compiler recurses along references without a bound of its own, and a thread has 8 MiB.
_STACK_BYTES = 4 << 20
_MOST_TOLD = 1000  # characters of an error
_PAGES = "/proc/self/statm"


def main() -> None:
    """Serve standard input until it ends, which it does with the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it means the process that asks
    try:
        work = {"render": _renderer, "compile": _compiler}[sys.argv[1]]()
        num_bytes = _in_memory_bytes()
    except Exception as error:  # of an installation that is not whole
        print(_message_of(error), flush=True)
        return
    if num_bytes is not None:
        _limit("RLIMIT_AS", num_bytes + _MEMORY_BYTES)
    for limit in ("RLIMIT_CORE", "RLIMIT_FSIZE"):
        _limit(limit, 0)
    print("ready", flush=True)
    for line in sys.stdin.buffer:
        print(json.dumps(_answer(work, line)), flush=True)


def _answer(work: Callable[..., str], line: bytes) -> dict[str, str]:
    """Return the text of one request, or why there is none: `exceeded` or `failed`."""
    try:
        asked = json.loads(line)
        most_s = asked.pop("most_s")
        most_chars = asked.pop("most_chars")
        _limit("RLIMIT_CPU", int(time.process_time()) + 1 + most_s)
        text = work(**asked)
    except MemoryError:
        return {"exceeded": f"it takes more than {_MEMORY_BYTES >> 20} MiB of memory"}
    except BaseException as error:  # of any kind: a template is a program, and compilers panic
        return {"failed": _message_of(error)}
    if len(text) > most_chars:
        return {"exceeded": f"it writes {len(text)} characters, at most {most_chars} may be"}
    return {"text": text}


def _message_of(error: BaseException) -> str:
    return " ".join(f"{error}"[:_MOST_TOLD].split()) or type(error).__name__


def _compiler() -> Callable[..., str]:
    """Return a function that compiles a grammar with llguidance, and says what is wrong with it."""
    from llguidance import LLMatcher

    _limit("RLIMIT_STACK", _STACK_BYTES)

    def compiling(source: str) -> str:
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(source)
        return messages[0] if is_wrong else ""

    return compiling


def _renderer() -> Callable[..., str]:
    """Return transformers' sandbox without torch, pictures and what it looks for on import."""
    sys.modules |= dict.fromkeys(("torch", "PIL"))  # type: ignore[arg-type]  # None marks what is not there
    package = find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        raise ImportError("transformers is missing")
    (folder,) = package.submodule_search_locations
    for name, path in (
        ("transformers", folder),
        ("transformers.utils", os.path.join(folder, "utils")),
    ):
        sys.modules[name] = module = types.ModuleType(name)
        module.__path__ = [path]
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:  # of a version that wants more of itself
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return lambda **asked: render_jinja_template(**asked)[0][0]


def _in_memory_bytes() -> int | None:
    """Return the addresses in use, libraries included; None where the system does not tell."""
    if not os.path.exists(_PAGES):
        return None
    with open(_PAGES) as pages:
        return int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit(name: str, most: int) -> None:
    """Set a soft limit, which a later request may move."""
    if sys.platform == "win32":  # has none of them
        return
    import resource

    limit = getattr(resource, name)
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
