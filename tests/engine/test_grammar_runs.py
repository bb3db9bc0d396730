"""Texts that keep a grammar: whole and valid, with every tree, and those of transformers; 200 answers in JSON."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, Pair, finished, save_pair, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import offload
from offload.drafting.draft_model import Draft
from offload.engine.decoder import Decoder
from offload.engine.generation import Generation
from offload.engine.request import Request
from offload.errors import UserError
from offload.options import CHAT_PAIR
from offload.sampling.grammar import Grammar, find_grammar
from offload.sampling_options import Sampling

llguidance = pytest.importorskip("llguidance")

PAIR = Path(offload.__file__).parent / "demo_pair"
PROMPT, NUM_NEW = "Describe a person as JSON: ", 80


def object_of(**properties: Any) -> dict[str, Any]:
    """A schema that wants all of these and nothing else."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def text_of(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


SCHEMA = object_of(
    name=text_of(12),
    age={"type": "integer", "minimum": 0, "maximum": 99},
    tags={"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
) | {"x-guidance": {"whitespace_pattern": "[ \\n]{0,2}"}}
TREES = ["none", "16x4", "dynamic:32x6", "chain:4"]
DRAWN = {"greedy": Sampling(), "warm": Sampling(temperature=1.0, seed=3), "top-p": Sampling(temperature=1.3, top_p=0.7)}
GRAMMARS = {
    "schema": find_grammar(json_schema=SCHEMA),
    "object": Grammar("json_object"),
    "regex": find_grammar(regex=r"(def [a-z]{2,9}\(\):\n    return [0-9]+\n){2}"),
    "lark": find_grammar(grammar='start: "[" pair ("," pair)* "]"\npair: /[a-z]+/ "=" /[0-9]{1,3}/'),
}


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with offload.load(
        PAIR / "target", PAIR / "draft", "1GiB", "32x6", context=200, dtype="float32", threads=1, profile="none",
        rule="sequoia", lookup=False,
    ) as decoder:  # fmt: skip
        yield decoder


def written(
    decoder: Decoder, grammar: Grammar | None, sampling: Sampling = DRAWN["greedy"], *, tree: str = "none",
    rule: str = "match", num_new: int = NUM_NEW, prompt: Any = PROMPT, **options: Any,
) -> Generation:  # fmt: skip
    options |= {"tree": tree, "rule": rule}
    return finished(decoder.start(Request(prompt, sampling, num_new, grammar=grammar, **options)))


@pytest.mark.parametrize("name", ["object", "regex"])
def test_half_a_character_of_the_prompt_is_no_part_of_the_answer(decoder: Decoder, name: str) -> None:
    """Prompts are given as ids, which may end anywhere."""
    ids = decoder.tokenizer(PROMPT)["input_ids"]
    day = decoder.tokenizer("日")["input_ids"]
    assert len(day) > 1, "the vocabulary has no such character"
    for half in (day[:1], day[:-1], 3 * day[-1:]):
        generation = written(decoder, GRAMMARS[name], prompt=ids + half)
        assert "\ufffd" not in generation.text
        wanted = written(decoder, GRAMMARS[name], prompt=ids + half, tree="16x4").text
        assert generation.text == wanted
        if name == "regex":
            assert generation.text.startswith("def ")
        else:
            assert generation.text.lstrip().startswith("{")


def test_what_comes_before_a_dead_end_is_text_with_every_tree(decoder: Decoder) -> None:
    grammar, allowed = find_grammar(grammar='start: "def f():" x\nx: x'), list[list[int]]()
    for tree in TREES:
        run = decoder.start(Request(PROMPT, Sampling(), 40, grammar=grammar, tree=tree, rule="match"))
        with pytest.raises(UserError, match="cannot be followed any further"):
            finished(run)
        allowed.append(run.result().token_ids)
    assert allowed[0] and allowed == [allowed[0]] * len(TREES)


def require_person(text: str) -> None:
    person = json.loads(text)
    assert [*person] == ["name", "age", "tags"] and len(person["name"]) <= 12 and 0 <= person["age"] <= 99
    assert len(person["tags"]) <= 2 and {*person["tags"]} <= {"red", "blue"}


@pytest.mark.parametrize("rule", ["match", "topk"])
@pytest.mark.parametrize("drawn", DRAWN)
def test_the_text_is_valid_and_the_same_with_every_tree(decoder: Decoder, drawn: str, rule: str) -> None:
    alone = written(decoder, GRAMMARS["schema"], DRAWN[drawn])
    assert alone.finish_reason == "stop"
    require_person(alone.text)
    for tree in TREES[1:]:
        result = written(decoder, GRAMMARS["schema"], DRAWN[drawn], tree=tree, rule=rule)
        assert (result.token_ids, result.text) == (alone.token_ids, alone.text), tree
        assert result.stats.num_sweeps < 0.8 * alone.stats.num_sweeps


@pytest.mark.parametrize("rule", ["sequoia", "specinfer", "spectr"])
def test_rules_with_ratio_tests_keep_it(decoder: Decoder, rule: str) -> None:
    alone = written(decoder, GRAMMARS["schema"])
    for tree in ("16x4", "chain:4"):
        assert written(decoder, GRAMMARS["schema"], tree=tree, rule=rule).token_ids == alone.token_ids
        for seed in range(2):
            options = Sampling(temperature=1.5, seed=seed)
            require_person(written(decoder, GRAMMARS["schema"], options, tree=tree, rule=rule).text)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Random models without a token for their end; a draft that is often right."""
    pair = save_pair(FAMILIES["llama"](), tmp_path_factory.mktemp("tiny"), noise=0.03)
    for folder in pair:
        save_tokenizer(folder, ["ab", "bc"])
    return pair


@pytest.fixture(scope="module")
def tiny_decoder(tiny: Pair) -> Iterator[Decoder]:
    with offload.load(
        *tiny, "1GiB", "16x4", context=64, dtype="float32", threads=1, profile="none", rule="sequoia", lookup=False
    ) as decoder:
        yield decoder


WARM = 4.0  # so that every text is drawn now and then


@pytest.fixture(scope="module")
def law(tiny: Pair) -> dict[str, float]:
    """Return the chances of the texts that `[abc]{2}` allows: by the target's own chances, token after token."""
    tokenizer, model = AutoTokenizer.from_pretrained(tiny[0]), AutoModelForCausalLM.from_pretrained(tiny[0])
    law: dict[str, float] = {}

    def follow(text: str, ids: list[int], chance: float) -> None:
        if len(text) == 2:
            law[text] = law.get(text, 0.0) + chance
            return
        pieces = [piece for piece in ("a", "b", "c", "ab", "bc") if len(text + piece) <= 2]
        tokens = tokenizer.convert_tokens_to_ids(pieces)
        with torch.no_grad():
            share = (model(torch.tensor([ids])).logits[0, -1, tokens] / WARM).softmax(0).tolist()
        for token, piece, part in zip(tokens, pieces, share, strict=True):
            follow(text + piece, [*ids, token], chance * part)

    follow("", tokenizer(PROMPT)["input_ids"], 1.0)
    return law


def chi_square(counts: Counter[str], law: dict[str, float], num_drawn: int) -> float:
    return sum((counts[text] - num_drawn * chance) ** 2 / (num_drawn * chance) for text, chance in law.items())


@pytest.mark.parametrize("rule", ["match", "sequoia", "specinfer", "spectr"])
def test_drawn_texts_have_the_masked_targets_law(tiny_decoder: Decoder, law: dict[str, float], rule: str) -> None:
    """Chi-square over all texts that a regex allows, 8 degrees of freedom: 26.1 has a p-value of 0.001."""
    counts, num_drawn = Counter[str](), 160
    grammar = find_grammar(regex="[abc]{2}")
    for seed in range(num_drawn):
        options = Sampling(temperature=WARM, seed=seed)
        counts[written(tiny_decoder, grammar, options, tree="8x2", rule=rule, num_new=3).text] += 1
    assert {*counts} <= {*law} and len(law) == 9 and sum(law.values()) == pytest.approx(1)
    assert min(law.values()) * num_drawn > 2
    assert chi_square(counts, law, num_drawn) < 26.1
    assert chi_square(counts, dict.fromkeys(law, 1 / 9), num_drawn) > 26.1, "a control: they are not equally likely"


def test_an_answer_may_be_cut_short_and_a_stop_string_ends_it(decoder: Decoder) -> None:
    assert written(decoder, GRAMMARS["schema"], num_new=5).finish_reason == "length"
    stopped = written(decoder, GRAMMARS["schema"], stop='"age"')
    assert stopped.finish_reason == "stop" and '"age"' not in stopped.text


@pytest.mark.parametrize("tree", ["none", "8x3", "dynamic:16x4"])
def test_a_model_without_an_end_stops_where_nothing_may_follow(tiny_decoder: Decoder, tree: str) -> None:
    result = written(tiny_decoder, Grammar("regex", "[abc]{7}"), tree=tree, num_new=20)
    assert result.finish_reason == "stop" and len(result.text) == 7 and {*result.text} <= {*"abc"}
    assert written(tiny_decoder, Grammar("regex", "[abc]+"), tree=tree, num_new=20).finish_reason == "length"


@pytest.mark.parametrize("rule", ["match", "topk", "sequoia", "specinfer", "spectr"])
def test_a_draft_that_knows_no_allowed_token(tiny_decoder: Decoder, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Its rows are cut so that letters are beyond its vocabulary: they come as those of a narrower draft do."""
    wide, grammar = Draft._as_wide_as_target, Grammar("regex", "[xyz]{9}")
    monkeypatch.setattr(Draft, "_as_wide_as_target", lambda self, logits_WV: wide(self, logits_WV[:, :40]))
    repeats = rule in ("match", "topk")
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=1)):
        alone = written(tiny_decoder, grammar, sampling, num_new=20, rule=rule)
        for tree in ["8x3", "dynamic:16x4"] if repeats else ["8x3"]:
            result = written(tiny_decoder, grammar, sampling, tree=tree, num_new=20, rule=rule)
            assert {*result.text} <= {*"xyz"} and len(result.text) == 9
            if repeats or sampling.is_greedy:
                assert result.token_ids == alone.token_ids


NUM_TOKENS = 256
AGE: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 150}
SIZE: dict[str, Any] = {"type": ["integer", "null"], "minimum": 0, "maximum": 9999}
ROW = object_of(kind={"enum": ["list", "dict", "set"]}, size=SIZE, note=text_of(15))
TAGS = {"type": "array", "items": text_of(10), "minItems": 1, "maxItems": 4}
SCHEMAS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "person": ("Describe a person as JSON.", 67, object_of(name=text_of(20), age=AGE)),
    "tags": ("What is a list? Answer as JSON.", 67, object_of(title=text_of(30), tags=TAGS, done={"type": "boolean"})),
    "rows": ("Give rows as JSON.", 66, {"type": "array", "minItems": 1, "maxItems": 3, "items": ROW}),
}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}


def breaches(value: Any, schema: dict[str, Any], place: str = "$") -> Iterator[str]:
    """Return the parts of a value that break a schema made of the words above."""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and type(value) not in [TYPES[kind] for kind in types]:
        yield f"{place} is {value!r}, none of {types}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is {value!r}, not in {schema['enum']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{place} is longer than {schema['maxLength']}: {value!r}"
    if type(value) is int and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{place} is out of bounds: {value}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{place} has {len(value)} items"
        for index, entry in enumerate(value):
            yield from breaches(entry, schema["items"], f"{place}[{index}]")
    if isinstance(value, dict):
        if not {*schema["required"]} <= {*value} <= {*schema["properties"]}:
            yield f"{place} has {[*value]}"
        for name in value.keys() & schema["properties"].keys():
            yield from breaches(value[name], schema["properties"][name], f"{place}.{name}")


BROKEN: list[tuple[str, Any]] = [
    ("person", []),
    ("person", {"name": "a"}),
    ("person", {"name": "a", "age": 151}),
    ("person", {"name": "a", "age": True}),
    ("person", {"name": "a" * 21, "age": 3}),
    ("person", {"name": "a", "age": 3, "more": 0}),
    ("tags", {"title": "", "tags": [], "done": True}),
    ("tags", {"title": "", "tags": ["a" * 11], "done": True}),
    ("tags", {"title": "", "tags": ["a"], "done": 1}),
    ("rows", [{"kind": "tuple", "size": 1, "note": ""}]),
    ("rows", [{"kind": "set", "size": 1.5, "note": ""}]),
]


@pytest.mark.parametrize(("name", "value"), BROKEN)
def test_what_breaks_a_schema_is_seen(name: str, value: Any) -> None:
    _, _, schema = SCHEMAS[name]
    assert len([*breaches(value, schema)]) == 1


@pytest.fixture(scope="module")
def chat_decoder() -> Iterator[Decoder]:
    with offload.load(
        CHAT_PAIR / "target", CHAT_PAIR / "draft", "1GiB", "dynamic:32x6", threads=1, profile="none"
    ) as chat_decoder:
        yield chat_decoder


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_whole_and_valid(chat_decoder: Decoder, name: str) -> None:
    """Each of them, and all texts are not one."""
    question, num_answers, schema = SCHEMAS[name]
    texts = list[str]()
    longest = 0
    for seed in range(num_answers):
        options: dict[str, Any] = {
            "max_new_tokens": NUM_TOKENS,
            "temperature": 1.0,
            "seed": seed,
            "json_schema": schema,
        }
        answer = chat_decoder.generate(question, **options)
        assert answer.finish_reason == "stop", f"seed {seed} is cut: {answer.text[-80:]!r}"
        assert [*breaches(json.loads(answer.text), schema)] == [], f"seed {seed}"
        between = re.sub(r'"(?:[^"\\]|\\.)*"', '""', answer.text)
        longest = max(longest, *map(len, re.findall(r"\s*", between)))
        texts.append(answer.text)
    print(f"{name}: {num_answers} valid, {len({*texts})} different, at most {longest} blanks between two parts")
    assert longest <= 1
    assert len({*texts}) > num_answers / 2
