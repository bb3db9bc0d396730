"""Every line that says "download again", "mend config.json" or "raise ...": an input that reaches it, which what the
line says mends.

Lines are found in the source: one that is new needs a row here. A row's input is sound except for one thing; the error
comes from the function of that row, with its remedy, and without that thing the same act succeeds.
"""

import ast
import json
import re
import shutil
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from coded_weights import expanded
from plans import plan_memory
from quantised import RECIPES, random_weight
from refusals import Break, config, drop, header, set_json
from test_bad_companions import SHAPE, Change, holding, missing, nested, shorter, text
from tiny import FAMILIES, SIZES, build, save, save_reciter
from transformers import MixtralConfig

import offload
from offload.checkpoint.checkpoint import ModelFiles
from offload.checkpoint.open import open_checkpoint, open_headers
from offload.checkpoint.small_files import check_tokenizer_files
from offload.engine.request import Request
from offload.engine.tokenizer import load_tokenizer
from offload.errors import UserError
from offload.model.headers import specified

SOURCE = Path(offload.__file__).parent
REMEDY = re.compile(r"download [a-z ]*again|mend [a-z_]*config\.json|raise (`\w+`|`$|--?\w+)")
# what is said where nothing is refused, and what takes a remedy out
NO_REFUSALS = {"cli/demo_run.py:comparison_lines", "cli/packaged.py:_without_context", "encoding/base.py:must"}

pytestmark = pytest.mark.usefixtures("_instant_link")


def _texts(node: ast.AST) -> list[str]:
    return [child.value for child in ast.walk(node) if isinstance(child, ast.Constant) and isinstance(child.value, str)]


@cache
def sites() -> Mapping[str, set[str]]:
    """Return the functions that tell such a remedy, as file:name, by text, by a constant, or by `must` without one."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    constants = defaultdict[str, set[Path]](set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(map(REMEDY.search, _texts(node.value))):
                constants[ast.unparse(node.targets[0])].add(path)
    # of texts built from others
    constants["TOKENIZER_FAILED"].add(SOURCE / "engine" / "tokenizer.py")
    literals = defaultdict[str, set[str]](set)
    for path, tree in trees.items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {each.asname or each.name for node in imports for each in node.names}
        names = {name for name, paths in constants.items() if path in paths or name in imported}
        _look(tree, "", names, literals, str(path.relative_to(SOURCE)))
    return literals


def _look(node: ast.AST, name: str, names: set[str], literals: dict[str, set[str]], file: str) -> None:
    for child in ast.iter_child_nodes(node):
        is_doc = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if is_doc:
            continue
        inner = f"{name}.{child.name}".strip(".") if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
        if inner:
            if isinstance(child, ast.Constant) and isinstance(child.value, str) and REMEDY.search(child.value):
                literals[f"{file}:{inner}"].add(child.value)
            if isinstance(child, ast.Name) and child.id in names and isinstance(child.ctx, ast.Load):
                literals[f"{file}:{inner}"].add(child.id)
            is_bare = isinstance(child, ast.Call) and ast.unparse(child.func) == "must"
            if is_bare and len(child.args) == 3 and not child.keywords:  # type: ignore[attr-defined]
                literals[f"{file}:{inner}"].add("must")
        _look(child, inner, names, literals, file)


class Acts(NamedTuple):
    """What fails, and the same with what its line says."""

    fails: Callable[[], object]
    works: Callable[[], object]


Row = Callable[[Path], Acts]


def coded(name: str, suffix: str, change: Change, **settings: Any) -> Row:
    """A weight of a recipe, of which one tensor is damaged, or settings are wrong."""

    def make(_: Path) -> Acts:
        weight = random_weight(*SHAPE)
        is_stack = name == "mxfp4"
        whole = dict(RECIPES[name].store(weight[None].mT if is_stack else weight).tensors)
        damaged = {key: tensor for key, tensor in whole.items() if key != suffix}
        changed = change(whole[suffix])
        damaged |= {} if changed is None else {suffix: changed}
        shape = (1, *SHAPE) if is_stack else SHAPE
        settings_of_file = RECIPES[name].config
        return Acts(
            lambda: expanded(damaged, {**settings_of_file, **settings}, shape),
            lambda: expanded(whole, settings_of_file, shape),
        )

    return make


def folder(change: Break, act: Callable[[Path], object] = lambda place: plan(place), family: str = "llama") -> Row:
    """A small model, in which something is damaged; a copy of it from before works."""

    def make(place: Path) -> Acts:
        sound = save(build(FAMILIES[family]()), place / "sound", max_shard_size="1GB")
        damaged = Path(shutil.copytree(sound, place / "damaged"))
        change(damaged)
        return Acts(lambda: act(damaged), lambda: act(sound))

    return make


def plan(place: Path) -> object:
    return plan_memory((open_checkpoint(place), None), ram=1 << 30, dtype="auto", context=16, num_nodes=1)


def load(place: Path) -> object:
    with offload.load(place, ram="1GiB", context=16, threads=1) as decoder:
        return decoder.generate([5, 6], max_new_tokens=1)


def overwrite(name: str, content: bytes) -> Break:
    return lambda place: (place / name).write_bytes(content)


def mixture(change: Break) -> Row:
    def make(place: Path) -> Acts:
        sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
        sound = save(build(MixtralConfig(**sizes)), place / "sound", max_shard_size="1GB")
        damaged = Path(shutil.copytree(sound, place / "damaged"))
        change(damaged)
        return Acts(lambda: load(damaged), lambda: load(sound))

    return make


def reciter(act: Callable[[Path, int], object], least: int, most: int) -> Row:
    """A model that chats, with too little context and with enough."""

    def make(place: Path) -> Acts:
        template = "{% for m in messages %}{{ m.content }}{% endfor %}:"
        model = save_reciter(place / "model", (":", "a", "b"), chat_template=template)
        return Acts(lambda: act(model, least), lambda: act(model, most))

    return make


def _opened(model: Path, context: int, **options: Any) -> Any:
    return offload.load(model, ram="1GiB", context=context, threads=1, dtype="float32", **options)


def chat(model: Path, context: int) -> object:
    with _opened(model, context) as decoder:
        return list(offload.Chat(decoder, max_new_tokens=1).ask("12345678" * 3))


def score(model: Path, context: int) -> object:
    with _opened(model, context) as decoder:
        return decoder.score_texts([([5] * 20, 1)])


def session(model: Path, context: int) -> object:
    with _opened(model, 64) as decoder:
        decoder.generate([5] * 20, max_new_tokens=2)
        decoder.save_session(model / "kept")
    with _opened(model, context) as decoder:
        return decoder.load_session(model / "kept")


def tree(model: Path, context: int) -> object:
    with _opened(model, context, draft=model, tree="chain:20"):
        return None


def ids(start_ids: tuple[int, ...], context: int) -> object:
    return Request([5] * 20, max_new_tokens=4).ids(None, 96, context, start_ids=start_ids)


def budget(**options: Any) -> Row:
    """Too little memory; the line tells how much is enough."""

    def make(place: Path) -> Acts:
        files = (open_checkpoint(save(build(FAMILIES["llama"]()), place)), None)
        needed: dict[str, str] = {}

        def fails() -> None:
            try:
                plan_memory(files, dtype="auto", context=16, num_nodes=1, **options)
            except UserError as error:
                named = re.search(r"raise `(\w+)` to (\w+)", str(error))
                assert named is not None, error
                needed[f"{named[1].removesuffix('_memory')}"] = named[2]
                raise

        def works() -> None:
            plan_memory(files, dtype="auto", context=16, num_nodes=1, **{**options, **needed})

        return Acts(fails, works)

    return make


def acts(act: Callable[[int], object], least: int = 16, most: int = 64) -> Row:
    return lambda _: Acts(lambda: act(least), lambda: act(most))


_NESTED_EMPTY = nested('"nested_blocksize": 0, "nested_offset": 1.0')
_STATE = ".weight.quant_state.bitsandbytes__nf4"
UP = "model.layers.1.mlp.up_proj.weight"


def expert(number: int) -> str:
    return f"model.layers.0.block_sparse_moe.experts.{number}.w1.weight"


ROWS: dict[str, Row] = {
    "checkpoint/files.py:read_json": folder(overwrite("config.json", b"{")),
    "checkpoint/gguf_header.py:_read": lambda place: _gguf(place),
    "checkpoint/methods.py:check_method": folder(config(quantization_config="int4")),
    "checkpoint/open.py:find_shards": folder(drop("*.safetensors*"), load),
    "checkpoint/safetensors.py:damaged": folder(lambda place: _cut(place / "model.safetensors", -64)),
    "checkpoint/small_files.py:check_tokenizer_files": folder(
        lambda place: _grown(place / "vocab.json"), check_tokenizer_files
    ),
    "distributed/pipeline_rank.py:PipelineRank._try_least": lambda place: _ranks(place),
    "encoding/base.py:require": coded("awq", ".qzeros", missing),
    "encoding/base.py:require_shape": coded("awq", ".scales", shorter),
    "encoding/base.py:checked_scale": coded("gptq", ".scales", holding(float("nan"))),
    "encoding/bitsandbytes.py:Bitsandbytes4.prepare": coded("nf4", _STATE, text('{"shape": [9], "blocksize": 64}')),
    "encoding/bitsandbytes.py:_parsed_state": coded("nf4", _STATE, text("{")),
    "encoding/bitsandbytes.py:_unnested": coded("nf4-nested", _STATE, _NESTED_EMPTY),
    "encoding/bitsandbytes.py:_recognise_4_bits": coded("nf4", ".weight.absmax", shorter),
    "encoding/floats.py:exponents": coded("mxfp4", "_scales", holding(255)),
    "encoding/floats.py:_recognise_float8": coded("fp8-block", ".weight_scale_inv", lambda tensor: tensor.T),
    "encoding/floats.py:_block": coded(
        "fp8-block", ".weight_scale_inv", lambda tensor: tensor, weight_block_size=[0, 128]
    ),
    "encoding/floats.py:_recognise_mxfp4_stack": coded("mxfp4", "_blocks", lambda tensor: tensor[..., :8]),
    "encoding/floats.py:_recognise_mxfp4": coded("mx-fp4", ".weight_packed", lambda tensor: tensor[:, :-1]),
    "encoding/floats.py:Nvfp4.prepare": coded("nvfp4", ".weight_global_scale", holding(1e-38)),
    "encoding/gptq.py:_recognise_gptq": coded("gptq", ".qzeros", lambda tensor: tensor[:, :9]),
    "encoding/integers.py:matrix_shape": coded("ct-w4", ".weight_packed", lambda tensor: tensor.flatten()),
    "encoding/integers.py:group_size": lambda _: _groups(),
    "encoding/integers.py:checked_order": coded("gptq-order", ".g_idx", holding(-1)),
    "encoding/mlx.py:_recognise": coded("mlx-4", ".scales", lambda tensor: tensor[:, :-1]),
    "encoding/torchao.py:_recognise": coded("torchao", "._weight_scale", shorter),
    "engine/chat.py:Chat._begin": reciter(chat, 16, 64),
    "engine/conversation.py:encode_prompt": lambda place: _failing_tokenizer(place, "encode"),
    "engine/conversation.py:_in_template": lambda place: _failing_tokenizer(place, "chat"),
    "engine/text_stream.py:TextStream._decode": lambda place: _failing_tokenizer(place, "decode"),
    "engine/decoder.py:Decoder.require_scores": reciter(score, 16, 64),
    "engine/request.py:Request.ids": acts(lambda context: ids((), context)),
    "engine/request.py:_check_source": acts(lambda context: ids((0,), context)),
    "engine/session.py:_checked": reciter(session, 16, 64),
    "engine/tokenizer.py:load_tokenizer": lambda place: _broken_tokenizer(place),
    "memory/planner.py:_MemoryLayout._computing_tier.refusal": budget(ram="1MiB"),
    "memory/planner.py:_MemoryLayout._feeding_tier.refusal": budget(ram="1MiB", gpu="4GiB"),
    "model/encoder_decoder.py:EncoderDecoderModel.__init__": lambda place: _encoder(place),
    "model/mapping.py:_refuse_missing": folder(header(lambda content: _renamed(content, UP, "other")), load),
    "model/meta.py:_refusing": folder(config(eos_token_id="2"), load),
    "model/mapping.py:_fused": mixture(header(lambda content: _reshaped(content, expert(1)))),
    "model/mapping.py:_check_numbers": mixture(header(lambda content: _renamed(content, expert(1), "other"))),
    "planning/choice.py:_check": reciter(tree, 16, 64),
}  # fmt: skip


def _renamed(content: dict[str, Any], name: str, other: str) -> None:
    content[name.replace(".weight", f".{other}")] = content.pop(name)


def _reshaped(content: dict[str, Any], name: str) -> None:
    content[name]["shape"] = content[name]["shape"][::-1]


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _grown(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((256 << 20) + 1)


def _gguf(place: Path) -> Acts:
    from stored import gguf

    sound = gguf("Q8_0")(place)
    damaged = place / "damaged.gguf"
    damaged.write_bytes(b"html" + sound.read_bytes()[4:])
    return Acts(lambda: open_headers(damaged), lambda: open_headers(sound))


def _broken_tokenizer(place: Path) -> Acts:
    model = save_reciter(place / "model", (":", "a"))
    damaged = Path(shutil.copytree(model, place / "damaged"))
    (damaged / "tokenizer.json").write_text("{}")
    return Acts(lambda: load_tokenizer(damaged), lambda: load_tokenizer(model))


def _failing_tokenizer(place: Path, act: str) -> Acts:
    """Its files name a longest text that is none, or a character of the vocabulary that is no byte."""
    model = save_reciter(place / "model", (":", "a"), chat_template="{{ messages[0].content }}")
    damaged = Path(shutil.copytree(model, place / "damaged"))
    set_json(damaged / "tokenizer_config.json", model_max_length="long")

    def run(folder: Path) -> object:
        from offload.engine.conversation import encode_messages, encode_prompt
        from offload.engine.text_stream import TextStream

        tokenizer = load_tokenizer(folder)
        if act == "encode":
            return encode_prompt(tokenizer, "a" * 50, raw=True)
        if act == "chat":
            return encode_messages(tokenizer, [{"role": "user", "content": "a" * 50}])
        if folder == damaged:
            tokenizer.decode = lambda *_, **__: 1 / 0
        return TextStream(tokenizer, [5], ()).push([6])

    return Acts(lambda: run(damaged), lambda: run(model))


def _groups() -> Acts:
    """Three scales a row of 160 columns, by a config that says of how many, and by one that does not."""
    recipe = RECIPES["ct-int8"]
    tensors = dict(recipe.store(random_weight(*SHAPE)).tensors)
    tensors[".weight_scale"] = tensors[".weight_scale"].expand(-1, 3).contiguous()

    def run(size: int | None) -> object:
        settings = json.loads(json.dumps(recipe.config))
        next(iter(settings["config_groups"].values()))["weights"]["group_size"] = size
        return expanded(tensors, settings, SHAPE)

    return Acts(lambda: run(None), lambda: run(64))


def _ranks(place: Path) -> Acts:
    from offload.distributed.pipeline_rank import PipelineRank

    checkpoint = specified(open_checkpoint(save(build(FAMILIES["llama"]()), place)))

    def run(ram_bytes: int) -> object:
        from offload.memory.plan import MemoryBudget

        files = ModelFiles(checkpoint, checkpoint)
        setup = SimpleNamespace(files=files, budget=MemoryBudget(ram_bytes=ram_bytes), dtype="auto")
        decoder: Any = SimpleNamespace(setup=setup, drafts=True, stage=None, context=64, num_uncommitted=64)
        return PipelineRank._try_least(decoder, None)

    return Acts(lambda: run(1 << 20), lambda: run(1 << 30))


def _encoder(place: Path) -> Acts:
    import small_t5

    sound = small_t5.save(small_t5.build("v1.1"), place / "sound", "v1.1")
    damaged = Path(shutil.copytree(sound, place / "damaged"))
    (damaged / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": 10**6}))
    return Acts(lambda: load(damaged), lambda: load(sound))


def test_every_such_line_has_a_row() -> None:
    assert sites().keys() - NO_REFUSALS == ROWS.keys()


@pytest.mark.parametrize("site", ROWS)
def test_the_remedy_is_true(site: str, tmp_path: Path) -> None:
    fails, works = ROWS[site](tmp_path)
    with pytest.raises((ValueError, UserError)) as caught:
        fails()
    assert REMEDY.search(str(caught.value)), caught.value
    file, _, function = site.partition(":")
    frames = [(frame.f_code.co_filename, frame.f_code.co_qualname) for frame, _ in traceback.walk_tb(caught.tb)]
    named = [name.replace(".<locals>", "") for path, name in frames if path == str(SOURCE / file)]
    assert function in named or function.rpartition(".")[2] in ("damaged", "refusal"), named
    works()


def test_a_new_line_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By each of the ways in which a line may tell a remedy."""
    (tmp_path / "new.py").write_text(
        'from offload.encoding.base import AGAIN\n_MINE = f"{1}: mend config.json"\n\n\n'
        'def plain():\n    raise ValueError("raise `ram`")\n\n\ndef built(name):\n    return f"raise `{name}`"\n\n\n'
        "def named():\n    return _MINE\n\n\nclass Kind:\n    def bare(self):\n        must(1, 2, 3)\n\n\n"
        'def silent():\n    """Say: download it again."""\n    must(1, 2, 3, "wait")\n'
    )
    monkeypatch.setattr("test_remedies.SOURCE", tmp_path)
    sites.cache_clear()
    try:
        assert {*sites()} == {f"new.py:{name}" for name in ("plain", "built", "named", "Kind.bare")}
    finally:
        sites.cache_clear()
