"""Compile an untrusted grammar in a process of its own: `python -P grammar_trial.py CPU_S < grammar`.

The compiler recurses along references without a bound of its own: a chain of some thousands ends
the process that it runs in. Here it has half the stack that a thread has elsewhere, and bounds on
memory and on the seconds of a processor, which the kernel keeps. Prints what is wrong, in JSON,
null if nothing is; an object with its `failure` where the compiler cannot be imported.

Invariant: nothing of the package is imported, so that it takes a tenth of a second.
"""

import json
import sys
import time

# a thread has 8 MiB
_STACK_BYTES = 4 << 20
_MEMORY_BYTES = 4 << 30


def main() -> None:
    """Read a grammar as llguidance takes it from standard input."""
    try:
        from llguidance import LLMatcher
    # the installation is not whole, or only the parent process has its path
    except ImportError as error:
        print(json.dumps({"failure": str(error)}))
        return

    if sys.platform != "win32":
        import resource

        limits = {
            resource.RLIMIT_STACK: _STACK_BYTES,
            resource.RLIMIT_AS: _MEMORY_BYTES,
            resource.RLIMIT_CORE: 0,
            # whole seconds; what the start has taken is none of the grammar's
            resource.RLIMIT_CPU: int(time.process_time()) + 1 + int(sys.argv[1]),
        }
        for what, most in limits.items():
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(
                what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
            )
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(sys.stdin.read())
    print(json.dumps(messages[0] if is_wrong else None))


if __name__ == "__main__":
    main()
