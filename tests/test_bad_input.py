"""Whatever is wrong is refused in one line that names rule, value and remedy: exit code 2, no traceback, no text.

Every case goes through the real command line. The sound folder that each case breaks is itself proved to work, so a
refusal is due to the break.
"""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import Outcome, process, shell
from tiny import FAMILIES, VOCAB_SIZE, build, save, save_reciter, save_tokenizer

import offload
from offload.checkpoint import open_checkpoint
from offload.errors import UserError
from offload.plan import model_shape, plan_memory
from offload.request import Request
from offload.skeleton import build_skeleton

Break = Callable[[Path], object]
ENOUGH = ("--ram", "1GiB", "--context", "64", "--threads", "1", "-n", "2")
HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _instant_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` measures the disk for half a second, which no case here is about."""
    monkeypatch.setattr("offload.calibrate.link_bytes_per_s", lambda shard: 1e9)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several shards with an index and a tokenizer."""
    return save_reciter(tmp_path_factory.mktemp("sound"), [":", " one", " two", " three"])


@pytest.fixture(scope="session")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file."""
    directory = save(build(FAMILIES["llama"]()), tmp_path_factory.mktemp("sound_file"), max_shard_size="1GB")
    save_tokenizer(directory)
    return directory


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "broken"))


@pytest.fixture
def broken_file(sound_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound_file, tmp_path / "broken"))


def assert_refused(outcome: Outcome, *words: str) -> None:
    assert outcome.err.count("\n") == 1 and outcome.err.endswith("\n"), f"one line, got {outcome.err!r}"
    assert outcome.err.startswith("offload: ") and len(outcome.err) < 600
    assert outcome.err[:-1].isprintable(), "nothing that moves a terminal's cursor"
    assert outcome.code == 2 and outcome.out == ""
    for word in words:
        assert word in outcome.err


def generate(model: Path, *arguments: object, stdin: bytes = b"") -> Outcome:
    return shell("generate", "-m", model, *ENOUGH, *arguments, stdin=stdin)


def contents(directory: Path) -> dict[str, bytes]:
    """Everything below a folder, byte by byte."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def refuse_folder(directory: Path, breaks: Break, words: tuple[str, ...], *, by_plan: bool) -> None:
    """Break the folder, see it refused by both commands, and see that refusing it wrote nothing."""
    breaks(directory)
    before = contents(directory.parent)
    assert_refused(generate(directory, "-p", "Count:"), *words)
    planned = shell("plan", "-m", directory, "--ram", "1GiB")
    if by_plan:
        assert_refused(planned, *words)
    else:
        assert planned.code == 0, "plan reads headers alone, and these are sound"
    assert contents(directory.parent) == before


def case(name: str, breaks: Break, *words: str, by_plan: bool = True) -> Any:
    return pytest.param(breaks, words, by_plan, id=name)


# Folders and configs


def config(**changes: object) -> Break:
    """Change entries of config.json; `...` drops one."""

    def change(directory: Path) -> None:
        settings = {**json.loads((directory / "config.json").read_text()), **changes}
        settings = {key: value for key, value in settings.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(settings))

    return change


def overwrite(name: str, content: bytes) -> Break:
    return lambda directory: (directory / name).write_bytes(content)


def only_pickles(directory: Path) -> None:
    for number, shard in enumerate(directory.glob("*.safetensors*")):
        shard.rename(directory / f"pytorch_model-{number}.bin")


def drop(pattern: str) -> Break:
    return lambda directory: [path.unlink() for path in directory.glob(pattern)]


def folder_for_file(name: str) -> Break:
    def replace(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return replace


GPTQ = {"quant_method": "gptq", "bits": 4}
FOLDERS = [
    case("missing directory", shutil.rmtree, "no model directory", "check the path"),
    case("no config", drop("config.json"), "no config.json", "Hugging Face model"),
    case("config not JSON", overwrite("config.json", b"{"), "config.json", "not valid JSON", "again"),
    case("config not UTF-8", overwrite("config.json", b"\xff\xfe{}"), "config.json", "again"),
    case("config nested too deep", overwrite("config.json", b"[" * 100_000), "config.json", "again"),
    case("config a list", overwrite("config.json", b"[]"), "list, not an object"),
    case("config a folder", folder_for_file("config.json"), "config.json"),
    case("config without sizes", config(hidden_size=...), "no hidden_size", "model.layers.0"),
    case("sizes as text", config(hidden_size="64"), "hidden_size"),
    case("more layers than tensors", config(num_hidden_layers=10**12), "no tensors for layer", "model.layers.0"),
    case("vocabulary as text", config(vocab_size="many"), "vocab_size"),
    case("heads as text", config(num_attention_heads="4"), "num_attention_heads"),
    case("positions as text", config(max_position_embeddings="long"), "max_position_embeddings"),
    case("feed-forward as a list", config(intermediate_size=[96]), "intermediate_size", by_plan=False),
    case("no heads", config(num_attention_heads=0), "model type llama is not supported", by_plan=False),
    case("negative heads", config(num_key_value_heads=-2), "num_key_value_heads"),
    case("config of another model", config(intermediate_size=128), "must have shape [128, 64]", by_plan=False),
    case("quantised", config(quantization_config=GPTQ), "gptq quantised", "use a bf16"),
    case("quantised in its own way", config(quantization_config="int4"), "quantised", "use a bf16"),
    case("type of integers", config(dtype="int8"), "cannot compute in int8", "--dtype bfloat16"),
    case("pickles only", only_pickles, "pickled weights", "can run code", "convert to safetensors"),
    case("no weights", drop("*.safetensors*"), "no safetensors files", "Hugging Face model"),
    case(
        "generation config broken", overwrite("generation_config.json", b"{"), "generation_config.json", by_plan=False
    ),
    case(
        "end token in words",
        overwrite("generation_config.json", b'{"eos_token_id": "</s>"}'),
        "eos_token_id",
        "'</s>'",
        by_plan=False,
    ),
    case("tokenizer broken", overwrite("tokenizer.json", b"{}"), "tokenizer", "again", by_plan=False),
    case("tokenizer cut", overwrite("tokenizer.json", b'{"model'), "tokenizer", "again", by_plan=False),
]


@pytest.mark.parametrize(("breaks", "words", "by_plan"), FOLDERS)
def test_folder_is_refused(breaks: Break, words: tuple[str, ...], by_plan: bool, broken: Path) -> None:
    refuse_folder(broken, breaks, words, by_plan=by_plan)


def test_what_the_cases_break_works(sound: Path, sound_file: Path) -> None:
    for directory in (sound, sound_file):
        assert generate(directory, "-p", "Count:").code == 0
        assert shell("plan", "-m", directory, "--ram", "1GiB").code == 0


# Shards and their index


def index(change: Callable[[dict[str, Any]], object]) -> Break:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return edit


def place_first_tensor_in(name: str) -> Break:
    return index(lambda content: content["weight_map"].update({min(content["weight_map"]): name}))


def shard_outside(directory: Path) -> None:
    shutil.copy(min(directory.glob("*.safetensors")), directory.parent / "outside.safetensors")
    place_first_tensor_in("../outside.safetensors")(directory)


def shard_dangling(directory: Path) -> None:
    shard = min(directory.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to("blobs/gone")


def swap_two_places(directory: Path) -> None:
    """Two tensors that lie in different files, each said to lie in the other's."""
    path = directory / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    places = content["weight_map"]
    first, last = min(places, key=places.__getitem__), max(places, key=places.__getitem__)
    places[first], places[last] = places[last], places[first]
    path.write_text(json.dumps(content))


INDEX = "model.safetensors.index.json"
INDEXES = [
    case("shard missing", drop("*-00002-of-*"), "model-00002-of-", "missing", "again"),
    case("shard dangling", shard_dangling, "model-00001-of-", "missing", "again"),
    case("shard outside", shard_outside, "../outside.safetensors", "not a file beside it"),
    case("shard absolute", place_first_tensor_in("/dev/zero.safetensors"), "not a file beside it"),
    case("shard a pickle", place_first_tensor_in("config.json"), "not a file beside it"),
    case("shard with a long name", place_first_tensor_in("x" * 300 + ".safetensors"), "missing"),
    case("shard with a zero byte", place_first_tensor_in("x\0.safetensors"), "missing"),
    case("index not JSON", overwrite(INDEX, b"nothing"), "not valid JSON", "again"),
    case("index without a map", index(lambda content: content.pop("weight_map")), "no usable weight_map"),
    case("index with an empty map", index(lambda content: content["weight_map"].clear()), "no usable weight_map"),
    case("index of numbers", index(lambda content: content["weight_map"].update(a=1)), "no usable weight_map"),
    case("index names another tensor", index(lambda c: c["weight_map"].update(a=c["weight_map"]["lm_head.weight"])),
         "places a in model-", "lacks it"),
    case("index mixes up shards", swap_two_places, "the index places", "lacks it"),
    case("shards without index", drop(INDEX), "safetensors files but no model.safetensors.index.json", "again"),
]  # fmt: skip


@pytest.mark.parametrize(("breaks", "words", "by_plan"), INDEXES)
def test_index_is_refused(breaks: Break, words: tuple[str, ...], by_plan: bool, broken: Path) -> None:
    refuse_folder(broken, breaks, words, by_plan=by_plan)


# Headers

NORM, UP, LAST = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.3.mlp.gate_proj.weight"


def split(shard: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    data_lo = 8 + int.from_bytes(shard[:8], "little")
    return json.loads(shard[8:data_lo]), shard[data_lo:]


def join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def header(change: Callable[[dict[str, Any]], object]) -> Break:
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors"
        content, data = split(path.read_bytes())
        change(content)
        path.write_bytes(join(json.dumps(content).encode(), data))

    return edit


def entry(name: str, **changes: object) -> Break:
    return header(lambda content: content[name].update(changes))


def moved(name: str, *, lo: int = 0, hi: int = 0) -> Break:
    def move(content: dict[str, Any]) -> None:
        offsets = content[name]["data_offsets"]
        content[name]["data_offsets"] = [offsets[0] + lo, offsets[1] + hi]

    return header(move)


def raw_header(text: bytes) -> Break:
    return lambda directory: (directory / "model.safetensors").write_bytes(join(text, b"\0" * 256))


def cut_file(num_bytes: int) -> Break:
    """Keep the first bytes, or with a negative number drop the last."""

    def cut(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes()[:num_bytes])

    return cut


def header_length(num_bytes: int) -> Break:
    def lie(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(num_bytes.to_bytes(8, "little") + path.read_bytes()[8:])

    return lie


def overlapping(content: dict[str, Any]) -> None:
    content[UP]["data_offsets"] = content[LAST]["data_offsets"]


MALFORMED = ("malformed header entry", "again")
TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
HEADERS = [
    case("truncated", cut_file(-10), "model.safetensors", "truncated", "again"),
    case("truncated in the header", cut_file(100), "header of", "in a file of 100", "again"),
    case("truncated in the length", cut_file(5), "in a file of 5", "again"),
    case("empty", cut_file(0), "in a file of 0", "again"),
    case("header longer than the file", header_length(1 << 30), "header of 1073741824 bytes", "again"),
    case("header of the greatest length", header_length(2**64 - 1), "header of", "again"),
    case("header of no length", header_length(0), "not valid JSON", "again"),
    case("header not JSON", raw_header(b"<html>"), "not valid JSON", "again"),
    case("header not UTF-8", raw_header(b'{"\xff": 1}'), "not valid JSON", "again"),
    case("header a list", raw_header(b"[]"), "list, not an object", "again"),
    case("header nested too deep", raw_header(b'{"a":' * 100_000), "not valid JSON", "again"),
    case("header with endless digits", raw_header(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON", "again"),
    case("header empty", raw_header(b"{}"), "no tensors for layer 0"),
    case("name twice", raw_header(TWICE), "occurs twice", "again"),
    case("key twice", raw_header(b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), "twice"),
    case("entry a number", header(lambda content: content.update({NORM: 7})), *MALFORMED),
    case("entry without a type", header(lambda content: content[NORM].pop("dtype")), *MALFORMED),
    case("type a number", entry(NORM, dtype=32), *MALFORMED),
    case("negative shape", entry(NORM, shape=[-64]), *MALFORMED),
    case("boolean shape", entry(NORM, shape=[True, 64]), *MALFORMED),
    case("fractional shape", entry(NORM, shape=[64.0]), *MALFORMED),
    case("huge shape", entry(NORM, shape=[2**62, 2**62]), "model.norm.weight", "again"),
    case("endless shape", entry(NORM, shape=[10**4000, 10**4000]), "model.norm.weight", "again"),
    case("shape of a thousand dimensions", entry(NORM, shape=[2**60] * 1000), "model.norm.weight", "again"),
    case("shape a text", entry(NORM, shape="64"), *MALFORMED),
    case("shape an object", entry(NORM, shape={}), *MALFORMED),
    case("one offset", entry(NORM, data_offsets=[0]), *MALFORMED),
    case("offsets reversed", entry(NORM, data_offsets=[256, 0]), *MALFORMED),
    case("negative offset", entry(NORM, data_offsets=[-256, 0]), *MALFORMED),
    case("endless offset", entry(NORM, data_offsets=[0, 9 * 10**4299]), "model.norm.weight", "again"),
    case("offsets too narrow", moved(NORM, hi=-4), "of shape [64] and F32 needs 256 bytes, has 252"),
    case("offsets beyond the end", moved(NORM, lo=1 << 40, hi=1 << 40), "ends at byte", "truncated"),
    case("offsets overlap", header(overlapping), UP, LAST, "overlap", "again"),
    case("tensor missing", header(lambda content: content.pop(UP)), f"tensor {UP} is missing", by_plan=False),
    case("norm missing", header(lambda content: content.pop(NORM)), f"tensor {NORM} is missing", by_plan=False),
    case("tensor of wrong shape", entry(UP, shape=[64, 96]), UP, "must have shape [96, 64]", "[64, 96]", by_plan=False),
    case("scalar", entry(UP, shape=[64 * 96]), UP, "must have shape [96, 64]", "[6144]", by_plan=False),
    case("type of 8 bits", entry(UP, dtype="F8_E4M3"), f"{UP} is F8_E4M3", "bf16, fp16 or fp32", by_plan=False),
    case("type nobody knows", entry(UP, dtype="\x1b[2J\nX"), UP, "bf16, fp16 or fp32", by_plan=False),
]


@pytest.mark.parametrize(("breaks", "words", "by_plan"), HEADERS)
def test_header_is_refused(breaks: Break, words: tuple[str, ...], by_plan: bool, broken_file: Path) -> None:
    refuse_folder(broken_file, breaks, words, by_plan=by_plan)


# Flags and prompts: refused before the first weight is read


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("weights are read although the command cannot run")

    monkeypatch.setattr("offload.host_store.HostStore.read", forbidden)


GENERATE, PLAN = ("generate", "-p", "Count:"), ("plan",)
BOTH = (GENERATE, PLAN)


def flags(name: str, arguments: str, *words: str, commands: tuple[tuple[str, ...], ...] = (GENERATE,)) -> Any:
    return pytest.param(arguments.split(), words, commands, id=name)


SIZE = "must be a size such as 8GiB"
TREE = "must be auto, none, NxD, grown:NxD, chain:L or sequences:KxL"
FLAGS = [
    flags("negative temperature", "--temp -1", "--temp must be 0 or more, got -1.0", "0 is greedy"),
    flags("temperature no number", "--temp nan", "--temp must be 0 or more, got nan", "0 is greedy"),
    flags("endless temperature", "--temp inf", "--temp must be 0 or more, got inf", "0 is greedy"),
    flags("temperature in words", "--temp hot", "--temp", "valid number", "offload --help"),
    flags("top-p of nothing", "--top-p 0", "--top-p must lie in (0, 1], got 0.0", "1 keeps every token"),
    flags("top-p beyond all", "--top-p 1.5", "--top-p must lie in (0, 1], got 1.5", "1 keeps every token"),
    flags("negative top-k", "--top-k -1", "--top-k must be 0 or more, got -1", "0 keeps every token"),
    flags("negative seed", "--seed -1", "--seed must lie in [0, 2^63), got -1"),
    flags("negative number of tokens", "-n -1", "-n", "greater than or equal to 0", "offload --help"),
    flags("no threads", "--threads 0", "--threads", "greater than or equal to 1", "offload --help"),
    flags("no context", "--context 0", "--context must be 1 or more, got 0", commands=BOTH),
    flags("context too long", "--context 65537", "--context must be at most 65536", "got 65537", commands=BOTH),
    flags("budget of nothing", "--ram 0", "--ram must be more than zero, got 0", "try 4GiB", commands=BOTH),
    flags("budget of less than a byte", "--ram 0.1", "--ram must be more than zero, got 0.1", commands=BOTH),
    flags("budget in words", "--ram lots", f"--ram {SIZE}", "'lots'", commands=BOTH),
    flags("negative budget", "--ram=-4GiB", f"--ram {SIZE}", "'-4GiB'", commands=BOTH),
    flags("budget without a number", "--ram GiB", f"--ram {SIZE}", "'GiB'", commands=BOTH),
    flags("budget in unknown units", "--ram 4XB", f"--ram {SIZE}", "'4XB'", commands=BOTH),
    flags("budget without end", f"--ram {'9' * 400}GiB", f"--ram {SIZE}", commands=BOTH),
    flags("unknown tree", "--tree oak", f"--tree {TREE}, got 'oak'", "try --tree 64x16", commands=BOTH),
    flags("tree without nodes", "--tree 0x4", "--tree must have numbers of 1 or more", "got '0x4'", commands=BOTH),
    flags("tree without depth", "--tree 8x", f"--tree {TREE}", "got '8x'", commands=BOTH),
    flags("tree of negative size", "--tree=-8x3", f"--tree {TREE}", "got '-8x3'", commands=BOTH),
    flags("tree too large", "--tree 99999x9", "at most 65536 nodes, got '99999x9'", commands=BOTH),
    flags("chain without length", "--tree chain:", f"--tree {TREE}", commands=BOTH),
    flags("sequences without length", "--tree sequences:4", f"--tree {TREE}", commands=BOTH),
    flags("tree without a draft", "--tree 8x3", "--tree needs a draft", "'8x3'", "give --draft", commands=BOTH),
    flags("unknown type", "--dtype int3", "--dtype must be one of auto, bfloat16", "got 'int3'", commands=BOTH),
    flags("unknown device", "--device tpu", "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    flags("device without a number", "--device cuda:x", "--device must be", "got 'cuda:x'"),
    flags("device memory on a CPU", "--device cpu --gpu-mem 4GiB", "--gpu-mem limits a CUDA device", "--ram"),
    flags(
        "device memory too small in a plan",
        "--gpu-mem 1MiB",
        "of device memory",
        "raise --gpu-mem to",
        commands=(PLAN,),
    ),
    flags("hardware unknown", "--hardware l41", "--hardware must be one of l40", "'l41'", commands=(PLAN,)),
    flags("hardware file missing", "--hardware nowhere.json", "cannot read nowhere.json", commands=(PLAN,)),
    flags("tokens of an unnamed tree", "--tokens-per-sweep 4", "belongs to one tree", commands=(PLAN,)),
    flags("device memory malformed", "--device cpu --gpu-mem much", f"--gpu-mem {SIZE}", "'much'"),
    flags("prompt and file", "-f prompt.txt", "-p and -f exclude each other", "give one"),
    flags("unknown option", "--fast", "No such option", "--fast", "offload --help", commands=BOTH),
    flags("argument too many", "another", "another", "offload --help", commands=BOTH),
]


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(("arguments", "words", "commands"), FLAGS)
def test_flags_are_refused(
    arguments: list[str], words: tuple[str, ...], commands: tuple[tuple[str, ...], ...], sound: Path
) -> None:
    for command in commands:
        assert_refused(shell(*command, "-m", sound, *arguments), *words)


@pytest.mark.skipif(HAS_CUDA, reason="says what happens without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_cuda_without_cuda_is_refused(device: str, sound: Path) -> None:
    outcome = generate(sound, "-p", "Count:", "--device", device)
    assert_refused(outcome, f"--device {device} needs a CUDA device", "use --device cpu")


def test_a_command_without_a_model_is_refused() -> None:
    assert_refused(shell("generate", "-p", "Count:"), "--model", "offload --help")
    assert_refused(shell("plan"), "--model", "offload --help")
    assert_refused(shell("conjure"), "conjure", "offload --help")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no/such/folder", ("no model directory at no/such/folder", "hub id")),
        ("~nobody-of-this-name/model", ("no model directory", "hub id")),
        ("x" * 300, ("no model directory", "hub id")),
        ("somebody/some-model", ("somebody/some-model", "hub", "check the network")),
        ("somebody/a..b", ("somebody/a..b", "hub", "check the name")),
    ],
)
def test_model_that_is_nowhere_is_refused(model: str, words: tuple[str, ...]) -> None:
    for command in BOTH:
        assert_refused(shell(*command, "-m", model), *words)


@pytest.mark.usefixtures("_no_weights")
def test_empty_stop_string_is_refused(sound: Path) -> None:
    assert_refused(generate(sound, "-p", "Count:", "--stop", ""), "a stop string must not be empty", "leave it out")


def test_model_that_is_a_file_is_refused(sound: Path) -> None:
    assert_refused(generate(sound / "config.json", "-p", "Count:"), "is a file", "give the folder")


@pytest.mark.usefixtures("_no_weights")
def test_prompts_are_refused(sound: Path, tmp_path: Path) -> None:
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes("caf\u00e9".encode("latin-1"))
    empty.write_bytes(b"")
    assert_refused(generate(sound, "-f", latin), "must be UTF-8", "latin.txt", "byte 3", "convert it")
    assert_refused(generate(sound, "-f", tmp_path / "gone.txt"), "gone.txt", "No such file", "check the path")
    assert_refused(generate(sound, "-f", tmp_path), "cannot read the prompt", "Is a directory", "check the path")
    assert_refused(generate(sound, "-f", empty), "the prompt is empty", "empty.txt", "give some text")
    assert_refused(generate(sound), "the prompt is empty", "standard input", "give some text")
    assert_refused(generate(sound, "-p", "-", stdin=b"\xff"), "must be UTF-8", "standard input", "byte 0")
    assert_refused(generate(sound, "-p", ""), "the prompt is empty", "-p", "give some text")
    assert_refused(generate(sound, "-p", "caf\udce9"), "must be UTF-8", "-p", "byte 3")


def test_prompt_longer_than_the_context_is_refused(sound: Path, request: pytest.FixtureRequest) -> None:
    assert generate(sound, "-p", "x" * 62).code == 0
    request.getfixturevalue("_no_weights")
    outcome = generate(sound, "-p", "x" * 63)
    assert_refused(outcome, "a prompt of 63 tokens and 2 new ones exceed the context of 64", "raise --context", "-n")


# What is refused early: before a weight is read, and what needs no model, before one is looked for


EARLY = [
    ("-p", "x" * 63, "exceed the context of 64"),
    ("--stop", "", "a stop string must not be empty"),
    ("--profile", "nowhere.json", "cannot read the profile nowhere.json"),
    ("--tree", "chain:64", "64 deep, the context has 64 positions"),
    ("--tree", "grown:99x70", "70 deep, the context has 64 positions"),
    ("--ram", "1MiB", "raise --ram to"),
]


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(("flag", "value", "words"), EARLY)
def test_no_weight_is_read_for_what_cannot_run(flag: str, value: str, words: str, sound: Path) -> None:
    given = {"-p": "Count:", "--tree": "auto"} | {flag: value}
    assert_refused(generate(sound, "-d", sound, *(word for pair in given.items() for word in pair)), words)


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request([5] * 60), "60 tokens and 128 new ones exceed the context of 64"),
        (Request([]), "the prompt is empty"),
        (Request([10**6]), "prompt ids must lie in"),
        (Request(["a"]), r"must be text or token ids, got \['a'\]"),  # type: ignore[list-item]
        (Request([1.5]), r"must be text or token ids, got \[1.5\]"),  # type: ignore[list-item]
        (Request(7), "must be text or token ids, got 7"),  # type: ignore[arg-type]
        (Request("Count:", max_new_tokens=-1), "the number of new tokens must be 0 or more, got -1"),
        (Request("Count:", max_new_tokens=1, stop=["a", ""]), "a stop string must not be empty"),
    ],
)
def test_the_first_request_is_checked_by_load(request_: Request, words: str, sound: Path) -> None:
    with pytest.raises(UserError, match=words):
        offload.load(sound, sound, "1GiB", context=64, threads=1, request=request_)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tree", "oak", "--tree must be"),
        ("tree", "grown:8x3", "rule sequoia is exact only without that"),
        ("rule", "luck", "--rule must be one of"),
        ("ram", "lots", "--ram must be a size"),
        ("dtype", "int3", "--dtype must be one of"),
        ("context", 0, "--context must be 1 or more"),
        ("threads", 0, "--threads must be 1 or more"),
        ("link_limit", "fast", "--link-limit must be a size"),
        ("device", "tpu", "--device must be"),
        ("profile", "nowhere.json", "cannot read the profile"),
    ],
)
def test_no_model_is_looked_for_in_vain(name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id would be downloaded first, hundreds of gigabytes perhaps."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a model is looked for although nothing could be done with it")

    monkeypatch.setattr("offload.loading.open_headers", forbidden)
    options: dict[str, Any] = {"rule": "sequoia", name: value}
    with pytest.raises(UserError, match=words):
        offload.load("some/model", "some/draft", **options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tree oak", "--tree must be"),
        ("--rule luck", "--rule must be one of"),
        ("--ram lots", "--ram must be a size"),
        ("-n 500", "exceed the context of 512"),
    ],
)
def test_demo_makes_no_target_in_vain(arguments: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.demo.inflate", None)
    assert_refused(shell("demo", *arguments.split()), words)


@pytest.mark.usefixtures("_no_weights")
def test_tune_measures_nothing_in_vain(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, command = tmp_path / "short.txt", ("tune", "-m", sound, "-d", sound, "--ram", "1GiB", "--text")
    short.write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_refused(shell(*command, short), "a text must have 64 tokens")
    assert_refused(shell(*command, short, "--tree", "oak"), "--tree must be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(short))
    assert_refused(shell(*command, short), "cannot write", "set XDG_CACHE_HOME")


@pytest.mark.parametrize("flag", ["--json", "--trace"])
@pytest.mark.parametrize("place", [".", "file/result.json"])
def test_bench_measures_nothing_that_it_cannot_store(flag: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ("bench", "decode", "-m", "no/such/folder", flag, tmp_path / place)
    assert_refused(shell(*command), "cannot write", "name another file")


@pytest.mark.usefixtures("_no_weights")
def test_prompt_without_a_tokenizer_is_refused(broken: Path) -> None:
    drop("tokenizer*")(broken)
    assert_refused(generate(broken, "-p", "Count:"), "no tokenizer", "token ids")


def test_chat_template_that_fails_is_refused(broken: Path) -> None:
    for template in ("{% for %}", "{{ raise_exception('only for system messages') }}"):
        (broken / "chat_template.jinja").write_text(template)
        assert_refused(generate(broken, "-p", "Count:"), "chat template", "--raw")
        assert generate(broken, "-p", "Count:", "--raw").code == 0


# Budgets


@pytest.mark.parametrize("options", ["--context 64", "--context 3000", "--context 512 --dtype bfloat16"])
def test_the_smallest_budget_that_is_named_works(options: str, sound: Path) -> None:
    command, settings = ("generate", "-m", sound, "-p", "Count:", "-n", "4", "--threads", "1"), options.split()
    too_small = shell(*command, "--ram", "1MiB", *settings)
    assert_refused(too_small, "for two layer slots", "budget is 1 MiB", "lower --context")
    named = re.search(r"raise --ram to (\d+)MiB", too_small.err)
    assert named is not None
    least_mib = int(named[1])
    refused = shell("plan", "-m", sound, "--ram", f"{least_mib - 1}MiB", *settings)
    assert_refused(refused, f"raise --ram to {least_mib}MiB")
    assert shell("plan", "-m", sound, "--ram", f"{least_mib}MiB", *settings).code == 0
    run = shell(*command, "--ram", f"{least_mib}MiB", *settings)
    assert run.code == 0 and run.out == " one two three:\n"


# Drafts and architectures


@pytest.mark.usefixtures("_no_weights")
def test_draft_with_another_vocabulary_is_refused(sound: Path, tmp_path: Path) -> None:
    stranger = save_reciter(tmp_path / "stranger", [":", " un", " deux"])
    outcome = generate(sound, "-d", stranger, "-p", "Count:")
    assert_refused(outcome, "the draft must share the target's vocabulary", "stranger", "target's family")


@pytest.mark.usefixtures("_no_weights")
def test_draft_of_another_width_is_refused(sound: Path, tmp_path: Path) -> None:
    """Without tokenizers to compare, the widths decide."""
    settings = FAMILIES["llama"]()
    settings.vocab_size = VOCAB_SIZE + 1
    draft = save(build(settings), tmp_path / "wide")
    outcome = generate(sound, "-d", draft, "-p", "Count:")
    assert_refused(outcome, "share the target's vocabulary", f"{VOCAB_SIZE + 1} entries", f"against {VOCAB_SIZE}")


def test_broken_draft_is_refused(sound: Path, broken: Path) -> None:
    drop("*-00002-of-*")(broken)
    for command in BOTH:
        assert_refused(shell(*command, "-m", sound, "-d", broken, "--ram", "1GiB"), "model-00002-of-", "missing")


_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
STRANGERS = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4},
    "t5": {"num_layers": 2, "d_model": 64},
    "bart": {"hidden_size": 64, "num_hidden_layers": 4},
    "bert": _SIZES,
    "mamba": _SIZES,
    "falcon_h1": _SIZES,
    "recurrent_gemma": _SIZES,
    "qwen3_next": {**_SIZES, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "rwkv": _SIZES,
    "never_heard_of": _SIZES,
}


@pytest.mark.parametrize("kind", STRANGERS)
def test_unsupported_architecture_is_refused(kind: str, broken: Path) -> None:
    (broken / "config.json").write_text(json.dumps({"model_type": kind, **STRANGERS[kind]}))
    assert_refused(generate(broken, "-p", "Count:"), f"model type {kind}")


def test_linear_attention_is_refused_for_its_state(broken: Path) -> None:
    (broken / "config.json").write_text(json.dumps({"model_type": "qwen3_next", **STRANGERS["qwen3_next"]}))
    outcome = generate(broken, "-p", "Count:")
    assert_refused(outcome, "linear_attention", "state cannot be rolled back", "Llama, Qwen")


def test_expert_without_a_partner_is_refused(tmp_path: Path) -> None:
    """Tensors that transformers fuses: every expert must bring both halves."""
    directory = save(build(FAMILIES["mixtral"]()), tmp_path / "experts", max_shard_size="1GB")
    save_tokenizer(directory)
    names = open_checkpoint(directory).tensors
    lost = next(name for name in sorted(names) if ".2.w1." in name)
    header(lambda content: content.pop(lost))(directory)
    assert_refused(generate(directory, "-p", "Count:"), "experts", "download the checkpoint again")


# Code that a checkpoint brings along

SPY = """
from pathlib import Path
Path(__file__).with_name("was_run").touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""


def bring_code(directory: Path) -> None:
    (directory / "spy.py").write_text(SPY)
    config(model_type="spy", auto_map={"AutoConfig": "spy.Config", "AutoModelForCausalLM": "spy.Model"})(directory)
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": [None, "spy.Tokenizer"]}}
    path.write_text(json.dumps({**settings, "tokenizer_class": "Tokenizer"}))


def test_code_of_a_checkpoint_is_never_run(broken: Path) -> None:
    """In a process of its own, where what transformers prints would show; consent on stdin changes nothing."""
    bring_code(broken)
    outcome = process("generate", "-m", broken, "-p", "Count:", *ENOUGH, stdin=b"y\ny\n")
    assert_refused(outcome, "model type spy is not supported")
    assert not list(broken.parent.rglob("was_run"))


def test_code_of_a_tokenizer_is_never_run(broken: Path) -> None:
    bring_code(broken)
    config(model_type="llama", auto_map=...)(broken)
    generate(broken, "-p", "Count:")
    assert not list(broken.parent.rglob("was_run"))


def test_refusal_in_a_process_of_its_own(broken_file: Path) -> None:
    cut_file(-10)(broken_file)
    assert_refused(process("plan", "-m", broken_file), "truncated", "download the checkpoint again")


# Random damage: only ever a refusal, or a load that is consistent

WORDS = (b"0", b"9" * 30, b"-1", b"null", b"true", b"[]", b"{}", b'""', b",", b'"')


def damaged(text: bytes, rng: random.Random) -> bytes:
    """Bytes overwritten, dropped, doubled, or exchanged for others that JSON knows."""
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(text))
        end = at + rng.randrange(1, 6)
        other = rng.choice((bytes([rng.randrange(256)]), b"", 2 * text[at:end], rng.choice(WORDS)))
        text = text[:at] + other + text[end:]
    return text


def test_random_damage_to_a_header_never_surprises(broken_file: Path) -> None:
    path, rng, num_refused = broken_file / "model.safetensors", random.Random(1), 0
    shard = path.read_bytes()
    data_lo = 8 + int.from_bytes(shard[:8], "little")
    for number in range(400):
        text = damaged(shard[8:data_lo], rng)
        claimed_bytes = len(text) + rng.choice((0, 0, 0, -1, 1, 1 << 40))
        path.write_bytes(claimed_bytes.to_bytes(8, "little") + text + shard[data_lo:])
        try:
            checkpoint = open_checkpoint(broken_file)
            model_shape(checkpoint)
        except UserError as error:
            assert len(str(error)) < 600, number
            num_refused += 1
        else:
            file_bytes = path.stat().st_size
            assert all(data_lo - 64 < e.lo <= e.hi <= file_bytes for e in checkpoint.tensors.values()), number
    assert 200 < num_refused < 400


def test_random_damage_to_a_config_never_surprises(broken_file: Path) -> None:
    path, rng, num_refused = broken_file / "config.json", random.Random(2), 0
    text = path.read_bytes()
    for number in range(100):
        path.write_bytes(damaged(text, rng))
        try:
            checkpoint = open_checkpoint(broken_file)
            plan_memory(checkpoint, None, ram="1GiB", dtype="auto", context=None, num_nodes=1)
            build_skeleton(checkpoint, torch.float32)
        except UserError as error:
            assert len(str(error)) < 600, number
            num_refused += 1
    assert 20 < num_refused < 100
