"""What a few minutes with a GPU are spent on, in order of value per second."""

from importlib.util import find_spec
from typing import NamedTuple

_ON_DEVICE = "streaming/test_on_a_device streaming/test_copies_on_gpu streaming/test_device_path "
_ON_DEVICE += "streaming/test_pinned sampling/test_sampler"
_OF_KERNELS = "kernels/test_kernels kernels/test_path_attention kernels/test_rms_norm kernels/test_expand_float8 "
_OF_KERNELS += "calibration/test_kernel_selection"


class Step(NamedTuple):
    """One child process; `{rows}` and `{out}` in its command stand for the file and the folder."""

    name: str
    command: tuple[str, ...]  # behind the interpreter
    budget_s: float  # its share; what earlier steps left unused comes on top
    # with less time it is not begun
    least_s: float
    skips_after: tuple[str, ...] = ()  # steps whose wrong token makes this one pointless
    # whether it is wrong tokens of passes that promise the same bits, or of the others
    is_invariant: bool = True


def _bench(name: str, *flags: str) -> tuple[str, ...]:
    return ("-m", "offload.bench.suite", name, "--rows", "{rows}", *flags)


def _tests(names: str, *flags: str) -> tuple[str, ...]:
    """Return the tests that only a device can run, file by file.

    One of the other files registers a device of its own.
    """
    usual = "-m pytest -q -m gpu -o filterwarnings=default --continue-on-collection-errors -p no:cacheprovider"
    rows = "-p offload.bench.gpu.pytest_rows --rows {rows}"
    return (*usual.split(), *rows.split(), *flags, *(f"tests/{name}.py" for name in names.split()))


def _parts(names: str) -> tuple[str, ...]:
    return tuple(word for name in names.split() for word in ("--part", name))


# With room for a 7B draft's tree of as many nodes as the largest sweep has rows, and layers that
# stream all the same.
ON_GPU = ("--device", "cuda", "--gpu-mem", "32GiB", "--ram", "100GiB")
ON_HOST = ("--device", "pretend")


def all_steps(is_rehearsal: bool) -> tuple[Step, ...]:
    """Return the table on this machine.

    `many` layers of the synthetic model are for what is left of a second call.
    """
    place, layers = (ON_HOST, ("8", "8")) if is_rehearsal else (ON_GPU, ("18", "40"))
    few, many = (("--layers", count) for count in layers)
    rows = ("--rows", "{rows}")
    workers = ("-p", "xdist", "-n", "8") if find_spec("xdist") else ()
    promised = "enqueue sweeps drafting trees trace soak memory link accelerate"

    def parts(names: str, *flags: str) -> tuple[str, ...]:
        return _bench("device", *_parts(names), *flags, *place, *few)

    large = _bench("device", *_parts("sweeps trees"), *place, *many)
    trace = ("--trace", "{out}/trace.json")
    gate = ("gate",)
    return (
        Step("facts", ("-m", "offload.bench.gpu.machine_facts", *rows), 25, 5),
        Step("gate", parts("gate"), 140, 60),
        Step("device", parts(promised, *trace), 260, 120, gate),
        Step("plain", parts("plain"), 90, 50, gate, is_invariant=False),
        Step("experts", parts("experts"), 80, 30),
        Step("tests", _tests(_ON_DEVICE), 150, 30),
        Step("kernel-tests", _tests(_OF_KERNELS, *workers), 120, 40),
        Step("kernels", _bench("kernels"), 80, 30),
        Step("large", large, 330, 200, gate),
    )
