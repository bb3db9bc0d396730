#!/usr/bin/env bash
# `tokenizer.json` holds a whole tokenizer, how a text is cut before merges included. With `"tokenizer_class":
# "PreTrainedTokenizerFast"` beside it, `AutoTokenizer` should give the ids that the package tokenizers gives for that file.
# Seen (transformers 5.24.0, tokenizers 0.23.3): where config.json says `"model_type": "qwen2"` (or qwen3_5) the stated class is
# passed over, TokenizersBackend too, and Qwen2Tokenizer takes vocabulary and merges alone: it cuts by its own expression. With
# `"llama"`, "qwen3" or no config.json the ids are the file's.
# Why it matters: a model of Qwen2's shape that was trained with another tokenizer (distilled, from scratch, of another language)
# gets ids it never saw in training, here for every number; the same tokenizer folder without config.json is right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cat > "$work/run.py" <<'PY'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

transformers.logging.set_verbosity_error()
words = Tokenizer(models.BPE())
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
words.train_from_iterator(["in 1999 and 2026"] * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
TEXT = "in 1999"
seen = {}
for stated in ("PreTrainedTokenizerFast", "TokenizersBackend"):
    for kind in (None, "llama", "qwen3", "qwen2", "qwen3_5"):
        folder = Path(sys.argv[1]) / f"{stated}-{kind}"
        folder.mkdir()
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": stated}))
        if kind is not None:
            (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(TEXT, add_special_tokens=False).input_ids
        seen[stated, kind] = ids == words.encode(TEXT).ids
        print(f"{stated}, {kind}: {type(tokenizer).__name__} cuts {tokenizer.convert_ids_to_tokens(ids)}")
print("the file itself:", words.encode(TEXT).tokens)
assert seen == {(stated, kind): kind not in ("qwen2", "qwen3_5") for stated, kind in seen}, seen
PY
"$work/env/bin/python" "$work/run.py" "$work" 2> "$work/log" || { cat "$work/log"; exit 1; }
echo "as it was seen"
