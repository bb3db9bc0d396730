"""The commands as a person or a script uses them: what goes to stdout, what to stderr, and how a run may end.

The model recites a text that is known beforehand, in tokens that cut its characters apart.
"""

import errno
import gc
import io
import json
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from shell import Outcome, process, shell, start
from tiny import save_reciter, save_tokenizer

import offload
from offload import cli, host_store
from offload.checkpoint import open_checkpoint
from offload.decode import Decoder
from offload.plan import plan_memory
from offload.target import Target
from offload.text import TextStream

# Tokens after the prompt's colon. A Chinese character is cut into three, an emoji into two; the last token ends a line.
PIECES = (":", " Hel", "lo", " w", "ör", "ld ", b"\xe6", b"\x97", b"\xa5", b" \xf0\x9f\x98", b"\x80", "!\n")
SAID = " Hello wörld 日 😀!\n"
NUM_SAID = len(PIECES) - 1
PROMPT = "Say:"
TREES = ("none", "chain:1", "8x3", "sequences:2x4", "chain:7")
LARGEST_TREE = "sequences:2x4"  # 9 nodes
CONTEXT = 256


@pytest.fixture(scope="session")
def ender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says its text once."""
    return save_reciter(tmp_path_factory.mktemp("ender"), PIECES, ends=True)


@pytest.fixture(scope="session")
def looper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says its text for ever, with the colon between."""
    return save_reciter(tmp_path_factory.mktemp("looper"), PIECES)


def streaming_ram(model: Path) -> int:
    """A budget under which every layer passes through three slots, with the model as its own draft."""
    files = open_checkpoint(model)
    roomy = plan_memory(files, files, ram=1 << 40, dtype="auto", context=CONTEXT, num_nodes=9)
    return roomy.fixed_bytes + 3 * max(roomy.layer_bytes)


def settings(model: Path, *, tree: str = "8x3") -> list[object]:
    """Flags of a streamed run with a draft that is always right."""
    return [
        "-m",
        model,
        "-d",
        model,
        "--tree",
        tree,
        "--ram",
        streaming_ram(model),
        "--context",
        CONTEXT,
        "--threads",
        1,
    ]


def open_decoder(model: Path, tree: str = LARGEST_TREE) -> Decoder:
    return offload.load(model, model, tree=tree, ram=streaming_ram(model), context=CONTEXT, threads=1)


def generate(
    model: Path, *arguments: object, tree: str = "8x3", prompt: str | None = PROMPT, stdin: bytes = b""
) -> Outcome:
    given = [] if prompt is None else ["-p", prompt]
    return shell("generate", *settings(model, tree=tree), *given, *arguments, stdin=stdin)


def generate_json(model: Path, *arguments: object, **options: Any) -> dict[str, Any]:
    outcome = generate(model, "--json", *arguments, **options)
    assert outcome.code == 0 and outcome.err == "", "one JSON object and nothing else"
    return only_object(outcome.out)


def only_object(out: str) -> dict[str, Any]:
    value = json.loads(out)
    assert isinstance(value, dict) and out.count("\n") == 1
    return value


# What a run prints


def test_text_goes_to_stdout_and_figures_to_stderr(ender: Path) -> None:
    outcome = generate(ender)
    with open_decoder(ender) as decoder:
        assert outcome.out == decoder.generate(PROMPT).text + "\n" == SAID + "\n"
    assert outcome.code == 0
    plan_line, tree_line, first, then = outcome.err.splitlines()
    assert "pass through 3 slots" in plan_line and "1 compute thread" in plan_line
    assert tree_line.startswith("tree of 8 nodes, 3 deep: default acceptance, no profile")
    assert f"{NUM_SAID + 1} tokens, the first after" in first
    assert "tokens/s" in first and "tokens per sweep" in first and "tree of 8 nodes, 3 deep" in first
    assert "GB/s" in then and "peak memory" in then


def test_quiet_says_nothing_on_stderr(ender: Path) -> None:
    assert generate(ender, "--quiet") == Outcome(0, SAID + "\n", "")


def test_nothing_to_stream_is_said(ender: Path) -> None:
    outcome = shell("generate", "-m", ender, "-p", PROMPT, "--ram", "1GiB", "--context", 64, "-n", 20, "--threads", 1)
    assert outcome.out == SAID + "\n" and "all 4 layers fit into memory" in outcome.err
    assert "no tree" in outcome.err


def test_no_tokens_are_generated_on_request(ender: Path) -> None:
    outcome = generate(ender, "-n", "0")
    assert outcome.code == 0 and outcome.out == "\n" and "no tokens generated" in outcome.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_appear_on_a_terminal_only(ender: Path) -> None:
    out, err = io.StringIO(), Terminal()
    argv = ["offload", "generate", *map(str, settings(ender)), "-p", PROMPT]
    with patch.object(sys, "argv", argv), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit):
        cli.main()
    assert out.getvalue() == SAID + "\n"
    assert "reading the prompt" in err.getvalue() and "reading the prompt" not in generate(ender).err


TOP_FIELDS = {"text", "token_ids", "num_prompt_tokens", "num_new_tokens", "finish_reason", "seed", "plan", "stats"}
STATS_FIELDS = {
    *("num_sweeps", "tokens_per_sweep", "ttft_s", "tpot_s", "sweep_s", "draft_s", "verify_s", "stall_s"),
    *("bytes_streamed", "link_bytes_per_s", "peak_rss_bytes", "peak_device_bytes", "tree"),
}


@pytest.mark.parametrize("tree", TREES)
def test_json_fields_agree_with_each_other(tree: str, looper: Path) -> None:
    result = generate_json(looper, "-n", "60", "--seed", "5", tree=tree)
    plan, stats = result["plan"], result["stats"]
    assert set(result) >= TOP_FIELDS and set(stats) >= STATS_FIELDS
    assert len(result["token_ids"]) == result["num_new_tokens"] == 60
    assert result["num_prompt_tokens"] == len(PROMPT) and result["seed"] == 5 and result["finish_reason"] == "length"
    assert result["text"] == recited(len(result["text"]))
    num_later = sum(stats["accepted_per_sweep"])
    assert len(stats["accepted_per_sweep"]) == stats["num_sweeps"]
    assert stats["tokens_per_sweep"] == pytest.approx(num_later / stats["num_sweeps"])
    assert stats["ttft_s"] > 0 and stats["tpot_s"] > 0 and 0 <= stats["stall_s"] <= stats["sweep_s"]
    decode_s = stats["tpot_s"] * num_later
    assert stats["draft_s"] + stats["sweep_s"] + stats["verify_s"] <= decode_s
    assert stats["link_bytes_per_s"] == pytest.approx(stats["bytes_streamed"] / decode_s)
    assert stats["peak_rss_bytes"] > 0 and stats["peak_device_bytes"] == 0
    assert plan["budgets"]["planned_bytes"] <= plan["budgets"]["ram_bytes"] == streaming_ram(looper)


def recited(num_chars: int) -> str:
    """So many characters of what the looper says."""
    return ((SAID + ":") * (num_chars // len(SAID) + 1))[:num_chars]


@pytest.mark.parametrize(("tree", "shape"), [("none", (1, 0)), ("chain:7", (8, 7)), ("sequences:2x4", (9, 4))])
def test_json_names_the_tree(tree: str, shape: tuple[int, int], looper: Path) -> None:
    depth = shape[1]
    stats = generate_json(looper, "-n", 4 * (depth + 1), tree=tree)["stats"]
    assert (stats["tree"]["num_nodes"], stats["tree"]["depth"]) == shape
    assert stats["tokens_per_sweep"] == depth + 1, "a draft that is always right fills every path"


@pytest.mark.parametrize("tree", ["grown:8x3", "8x3"])
def test_json_tells_a_grown_tree_from_a_fixed_one(tree: str, looper: Path) -> None:
    assert generate_json(looper, "-n", 4, tree=tree)["stats"]["tree"]["is_grown"] == tree.startswith("grown")


def test_bytes_streamed_are_those_of_the_plan(looper: Path) -> None:
    """Every sweep moves the layers that do not stay; the slots read ahead, and a block may be shared at either end."""
    result = generate_json(looper, "-n", "100", tree="none")
    plan, stats = result["plan"], result["stats"]
    tiers, slots = plan["tiers"], plan["slots"]
    assert tiers["resident"] == {"num_layers": 0, "num_bytes": 0} and tiers["disk"]["num_layers"] == 4
    assert stats["num_sweeps"] == 99
    planned_bytes = stats["num_sweeps"] * tiers["disk"]["num_bytes"]
    ahead_bytes, blocks_bytes = slots["num_slots"] * slots["slot_bytes"], stats["num_sweeps"] * 4 * 8192
    assert planned_bytes - ahead_bytes - blocks_bytes <= stats["bytes_streamed"] <= planned_bytes + ahead_bytes


def test_nothing_is_streamed_when_everything_fits(looper: Path) -> None:
    outcome = shell("generate", "-m", looper, "-p", PROMPT, "--ram", "1GiB", "--context", 64, "-n", 20, "--json")
    result = only_object(outcome.out)
    assert result["stats"]["bytes_streamed"] == 0 and result["stats"]["stall_s"] == 0
    assert result["plan"]["tiers"]["disk"] == {"num_layers": 0, "num_bytes": 0}


def test_sampling_flags_reach_the_sampler(looper: Path) -> None:
    flags = ("--temp", "40", "--top-p", "0.9", "--top-k", "30", "-n", "20")
    results = [generate_json(looper, *flags, "--seed", seed)["token_ids"] for seed in (1, 2)]
    with open_decoder(looper) as decoder:
        for seed, token_ids in zip((1, 2), results, strict=True):
            sampling = {"temperature": 40, "top_p": 0.9, "top_k": 30, "seed": seed}
            assert decoder.generate(PROMPT, max_new_tokens=20, **sampling).token_ids == token_ids
    assert results[0] != results[1]


# Where a prompt comes from


def test_prompt_from_flag_file_and_pipe_are_the_same(ender: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüß dich:", encoding="utf-8")
    wanted = generate_json(ender, prompt="Grüß dich:")
    assert wanted["num_prompt_tokens"] == len("Grüß dich:".encode()) and wanted["text"] == SAID
    piped = file.read_bytes()
    others = (
        generate_json(ender, "-f", file, prompt=None),
        generate_json(ender, prompt=None, stdin=piped),
        generate_json(ender, prompt="-", stdin=piped),
    )
    for other in others:
        for field in ("text", "token_ids", "num_prompt_tokens"):
            assert other[field] == wanted[field]


def test_chat_template_is_applied_unless_raw(tmp_path: Path) -> None:
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    model = save_reciter(tmp_path, PIECES, ends=True, chat_template=template)
    chat, raw = generate_json(model, prompt="Say"), generate_json(model, "--raw", "-n", "3", prompt="Say")
    assert chat["num_prompt_tokens"] == len(["<s>", *"Say", ":"]) and chat["text"] == SAID
    assert raw["num_prompt_tokens"] == len("Say")
    assert generate_json(model, "--raw", prompt="Say:")["text"] == SAID


# Where a text ends


def test_end_token_stops(ender: Path) -> None:
    for tree in TREES:
        result = generate_json(ender, tree=tree)
        assert result["finish_reason"] == "stop" and result["text"] == SAID
        assert len(result["token_ids"]) == NUM_SAID + 1 and result["token_ids"][-1] == 2, "the end is a token, not text"


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_length_stops_inside_a_burst(num_tokens: int, looper: Path) -> None:
    with open_decoder(looper) as decoder:
        results = [decoder.generate(PROMPT, max_new_tokens=num_tokens, tree=tree) for tree in TREES]
    assert {len(result.token_ids) for result in results} == {num_tokens}
    assert {result.finish_reason for result in results} == {"length"}
    assert len({result.text for result in results}) == 1


STOPS = [
    (("wör",), " Hello "),  # begins and ends within tokens
    (("o wörld 日",), " Hell"),  # over seven tokens, and a character in three parts
    (("\n",), " Hello wörld 日 😀!"),
    ((" ",), ""),
    (("never said",), SAID),
    (("😀", "日"), " Hello wörld "),  # the order in which they are given does not matter
    (("日", "😀"), " Hello wörld "),
    (("lo w", "o"), " Hell"),  # the first one to be complete counts, not the first one to begin
    (("😀!\n", "Hello there"), " Hello wörld 日 "),
]


@pytest.mark.parametrize(("stops", "text"), STOPS)
def test_stop_strings_end_every_tree_at_the_same_place(stops: tuple[str, ...], text: str, ender: Path) -> None:
    with open_decoder(ender) as decoder:
        results = [decoder.generate(PROMPT, stop=stops, tree=tree) for tree in TREES]
        pieces = ["".join(decoder.stream(PROMPT, stop=stops, tree=tree)) for tree in TREES]
    assert {result.text for result in results} == {text}
    assert set(pieces) == {text}, "nothing of a stop string was shown before it was complete"
    assert len({tuple(result.token_ids) for result in results}) == 1
    assert {result.finish_reason for result in results} == {"stop"}


def test_stop_flag_may_be_given_several_times(ender: Path) -> None:
    assert generate(ender, "--stop", "日", "--stop", "😀").out == " Hello wörld \n"


# Text in pieces


@pytest.fixture(scope="session")
def stream_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextStream]:
    tokenizer = save_tokenizer(tmp_path_factory.mktemp("tokenizer"), PIECES)
    return lambda stop=(): TextStream(tokenizer, tokenizer("äöü 日:")["input_ids"], stop)


def bursts(tokens: list[int], rng: random.Random) -> Iterator[list[int]]:
    while tokens:
        length = rng.randrange(1, 6)
        yield tokens[:length]
        tokens = tokens[length:]


def test_characters_are_never_broken(stream_of: Callable[..., TextStream], tmp_path: Path) -> None:
    text, rng = "añ日😀é…ß😀\n" * 4, random.Random(3)
    tokens = save_tokenizer(tmp_path)(text)["input_ids"]
    assert len(tokens) == len(text.encode()), "every byte is a token of its own"
    for _ in range(40):
        stream = stream_of()
        pieces = [stream.push(burst)[0] for burst in bursts(tokens, rng)] + [stream.finish()]
        assert "".join(pieces) == text == stream.text
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_are_shown_once_it_is_certain(
    stream_of: Callable[..., TextStream], tmp_path: Path
) -> None:
    tokenizer = save_tokenizer(tmp_path)
    lone, letter = tokenizer("日")["input_ids"][0], tokenizer("a")["input_ids"][0]
    stream = stream_of()
    assert [stream.push([token])[0] for token in (lone, letter, lone)] == ["", "\ufffda", ""]
    assert stream.whole() == "\ufffda\ufffd" and stream.text == "\ufffda", "looking takes nothing"
    assert stream.finish() == "\ufffd"


def test_bursts_never_change_where_a_stop_string_ends_a_text(
    stream_of: Callable[..., TextStream], tmp_path: Path
) -> None:
    text, rng = "a日ab😀aab日b" * 3, random.Random(4)
    tokens = save_tokenizer(tmp_path)(text)["input_ids"]
    num_stopped = 0
    for _ in range(150):
        stop = ["".join(rng.choices("ab日😀", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        endings = {ending(stream_of(stop), ([token] for token in tokens))}
        endings |= {ending(stream_of(stop), bursts(tokens, rng)) for _ in range(3)}
        ((shown, _, has_stopped),) = endings
        assert not any(word in shown for word in stop)
        num_stopped += has_stopped
    assert 30 < num_stopped < 150


def ending(stream: TextStream, pushed: Iterator[list[int]]) -> tuple[str, tuple[int, ...], bool]:
    """What was shown, the tokens that count, and whether a stop string was met."""
    shown = ""
    for burst in pushed:
        piece, has_stopped = stream.push(burst)
        shown += piece
        if has_stopped:
            return shown, tuple(stream.tokens_until_stop()), True
    return shown + stream.finish(), (), False


# Runs that end early


def at_sweep(number: int, act: Callable[[], object]) -> Any:
    """Patch the target so that `act` runs just before a sweep; the prompt's is number 1."""
    score, count = Target.score, iter(range(1, 1 << 30))

    def counted(self: Target, *arguments: Any) -> Any:
        if next(count) == number:
            act()
        return score(self, *arguments)

    return patch.object(Target, "score", counted)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_interrupt_prints_what_was_accepted(looper: Path) -> None:
    with at_sweep(4, interrupt):
        outcome = generate(looper, tree="chain:1")
    assert outcome.code == 130 and outcome.out == " Hello wörld \ufffd\n", "a character cut short is shown as such"
    assert outcome.err.splitlines()[-1] == "offload: interrupted" and "6 tokens" in outcome.err


def test_interrupt_leaves_valid_json(looper: Path) -> None:
    with at_sweep(4, interrupt):
        outcome = generate(looper, "--json", tree="chain:1")
    result = only_object(outcome.out)
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"
    assert result["finish_reason"] == "interrupted" and result["text"].startswith(" Hello wörld ")
    assert len(result["token_ids"]) == result["num_new_tokens"] == 6 and result["stats"]["num_sweeps"] == 2


def test_interrupt_before_the_first_token(looper: Path) -> None:
    with at_sweep(1, interrupt):
        outcome = generate(looper, "--json")
    assert outcome.code == 130 and outcome.err == "offload: interrupted\n"
    assert only_object(outcome.out)["token_ids"] == []


def test_interrupt_while_loading(looper: Path) -> None:
    with patch("offload.loading.load_tokenizer", lambda _: interrupt()):
        assert generate(looper) == Outcome(130, "", "offload: interrupted\n")


def endless(model: Path) -> list[object]:
    """A run that outlasts any test."""
    sizes = ("--ram", "1GiB", "--context", 60_000, "-n", 59_000, "--threads", 1)
    return ["generate", "-m", model, "-d", model, "--tree", "8x3", *sizes, "-p", PROMPT]


def test_interrupted_process_leaves_in_order(looper: Path) -> None:
    with start(*endless(looper)) as running:
        assert running.stdout is not None
        head = running.stdout.read(4)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=300)
    text = (head + out).decode()
    assert running.returncode == 130 and text.endswith("\n")
    text = text[:-1].rstrip("\ufffd")
    assert text == recited(len(text))
    assert err.decode().splitlines()[-1] == "offload: interrupted" and b"Traceback" not in err


def test_closed_pipe_is_not_an_error(looper: Path) -> None:
    with start(*endless(looper)) as running:
        assert running.stdout is not None and running.stderr is not None
        head = running.stdout.read(5)
        running.stdout.close()
        err = running.stderr.read()
    assert running.returncode == 0 and head == b" Hell"
    assert b"Traceback" not in err and b"Exception" not in err


def test_pipe_closed_from_the_start_is_not_an_error(looper: Path) -> None:
    """What is printed in one go breaks when it is flushed, which may be as late as the interpreter's end."""
    for command in (("plan", "-m", looper, "--ram", "1GiB", "--json"), ("plan", "-m", looper), ("--help",)):
        with start(*command) as running:
            assert running.stdout is not None and running.stderr is not None
            running.stdout.close()
            assert running.stderr.read() == b""
        assert running.returncode == 0


def failing_reads(number: int) -> Any:
    """Patch the disk so that reads fail from this one on."""
    preadv, count = os.preadv, iter(range(1, 1 << 30))

    def read(fd: int, buffers: Any, offset: int) -> int:
        if next(count) >= number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    return patch.object(host_store.os, "preadv", read)


def num_readers() -> int:
    return sum(thread.name.startswith("offload-read") for thread in threading.enumerate())


def assert_ended_by_disk(outcome: Outcome, *words: str) -> None:
    assert outcome.code == 1 and "Traceback" not in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith("offload: ") and all(word in last for word in words)
    assert num_readers() == 0, "nothing goes on in the background"


def test_read_error_in_mid_run_keeps_the_text(looper: Path) -> None:
    for arguments in ((), ("--json",)):
        with failing_reads(70):
            outcome = generate(looper, *arguments, tree="chain:1")
        assert_ended_by_disk(outcome, "reading model-", "failed: Input/output error")
        text = only_object(outcome.out)["text"] if arguments else outcome.out[:-1]
        assert text.startswith(" Hel") and text.rstrip("\ufffd") == recited(len(text.rstrip("\ufffd")))
        assert not arguments or (
            outcome.err.count("\n") == 1 and only_object(outcome.out)["finish_reason"] == "interrupted"
        )


def test_read_error_while_loading(looper: Path) -> None:
    with failing_reads(12):
        outcome = generate(looper)
    assert_ended_by_disk(outcome, "failed: Input/output error")
    assert outcome.out == "" and outcome.err.count("\n") == 1


def test_file_cut_short_in_mid_run_keeps_the_text(tmp_path: Path) -> None:
    model = save_reciter(tmp_path, PIECES)

    def cut() -> None:
        for shard in model.glob("*.safetensors"):
            os.truncate(shard, 5000)

    with at_sweep(3, cut):
        outcome = generate(model, tree="chain:1")
    assert_ended_by_disk(outcome, "model-", "cut short while in use")
    assert outcome.out.startswith(" Hello w")


def test_file_replaced_in_mid_run_goes_unnoticed(tmp_path: Path) -> None:
    model = save_reciter(tmp_path, PIECES, ends=True)

    def replace() -> None:
        for shard in model.glob("*.safetensors"):
            shard.unlink()
            shard.write_bytes(b"something else")

    with at_sweep(3, replace):
        assert generate(model, tree="chain:1").out == SAID + "\n"


# What is given back


def test_close_gives_back_threads_files_and_memory(looper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[weakref.ref[np.ndarray]] = []
    allocate = host_store.allocate

    def remembered(num_bytes: int) -> np.ndarray:
        buffer = allocate(num_bytes)
        buffers.append(weakref.ref(buffer))
        return buffer

    for module in ("host_store", "layer_stream"):
        monkeypatch.setattr(f"offload.{module}.allocate", remembered)
    before = None
    for _ in range(4):
        decoder = open_decoder(looper)
        decoder.generate(PROMPT, max_new_tokens=5)
        assert num_readers() > 0
        decoder.close()
        after = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        assert before in (None, after), "every round leaves what the first one left"
        before = after
        assert num_readers() == 0
        assert len(buffers) > 10 and all(buffer() is None for buffer in buffers), "close frees, not the next collection"


def test_failed_loads_give_back_threads_and_files(looper: Path, tmp_path: Path) -> None:
    stranger = save_reciter(tmp_path, [":", " un", " deux"])
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(offload.UserError, match="vocabulary"):
            offload.load(looper, stranger, ram="1GiB", context=64, threads=1)
        with failing_reads(12), pytest.raises(offload.ReadError):
            open_decoder(looper)
    gc.collect()
    assert num_readers() == 0 and len(os.listdir("/proc/self/fd")) == files


def test_closed_decoder_refuses(looper: Path) -> None:
    decoder = open_decoder(looper)
    decoder.close()
    decoder.close()
    with pytest.raises(offload.UserError, match="closed: load the model again"):
        decoder.generate(PROMPT)


def test_decoder_goes_on_after_an_abandoned_run(looper: Path) -> None:
    with open_decoder(looper) as decoder:
        wanted = decoder.generate(PROMPT, max_new_tokens=30).token_ids
        for _, __ in zip(decoder.stream(PROMPT, max_new_tokens=30), range(2), strict=False):
            pass
        with at_sweep(3, interrupt), pytest.raises(KeyboardInterrupt):
            decoder.generate(PROMPT, max_new_tokens=30)
        assert decoder.generate(PROMPT, max_new_tokens=30).token_ids == wanted


def test_a_run_that_was_overtaken_refuses(looper: Path) -> None:
    """It would go on with the keys and values of another sequence."""
    with open_decoder(looper) as decoder:
        overtaken = decoder.stream(PROMPT, max_new_tokens=30)
        next(overtaken)
        last = decoder.stream(PROMPT, max_new_tokens=30)
        next(last)
        with pytest.raises(offload.UserError, match="finish one before the next"):
            next(overtaken)
        next(last)
    with pytest.raises(offload.UserError, match="was closed"):
        next(last)


# The other commands


def test_plan_shows_where_everything_lies(looper: Path) -> None:
    outcome = shell("plan", *settings(looper)[:-2])
    assert outcome.code == 0 and outcome.err == ""
    for word in (
        "3 slots for 4 streamed layers",
        "embeddings and head",
        "draft",
        "256 positions",
        "8 tree nodes",
        "GB/s",
    ):
        assert word in outcome.out


def test_plan_is_the_plan_that_a_run_follows(looper: Path) -> None:
    planned = only_object(shell("plan", *settings(looper)[:-2], "--json").out)
    followed = generate_json(looper, "-n", "1")["plan"]
    assert {key: planned[key] for key in followed} == followed
    assert planned["fits"] is True and planned["bytes_per_sweep"] == followed["tiers"]["disk"]["num_bytes"]
    assert planned["sweep_s"] == pytest.approx(planned["bytes_per_sweep"] / planned["link_bytes_per_s"])


LISTS_IMPORTS = """
import sys
from offload.cli import main
try:
    main()
finally:
    print(*{name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "accelerate"}, file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["--help", "generate --help", "plan --json -m"])
def test_commands_that_compute_nothing_import_nothing_heavy(command: str, looper: Path) -> None:
    """Which is what makes them quick, on a busy machine too."""
    model = [looper] if command.endswith("-m") else []
    outcome = process(*command.split(), *model, python=("-c", LISTS_IMPORTS))
    assert outcome.code == 0 and outcome.err == "\n" and outcome.out


@pytest.mark.parametrize("command", ["generate", "plan", "demo"])
def test_help_teaches_by_example(command: str) -> None:
    outcome = shell(command, "--help")
    assert outcome.code == 0 and outcome.err == ""
    _, examples = outcome.out.split("Examples:")
    assert f"offload {command}" in examples


def test_help_is_what_a_newcomer_gets() -> None:
    outcome = shell()
    assert outcome == shell("--help") and outcome.code == 0
    assert "generate" in outcome.out and "Start here: offload demo" in outcome.out


def test_process_prints_text_and_nothing_else(ender: Path) -> None:
    """With everything that libraries print by themselves."""
    assert process("generate", *settings(ender), "-p", PROMPT, "--quiet") == Outcome(0, SAID + "\n", "")
