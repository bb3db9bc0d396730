"""How the files beside this were made: a matrix of a tiny Llama, as each tool stores it, and the tool's own numbers.

    python make.py base DIR                      # with transformers: the model in DIR/llama
    python make.py mlx|torchao|gptqmodel|autoround DIR     # each in an environment with that tool

Every line below wrote DIR/NAME; of each, `model.layers.0.self_attn.k_proj` was kept (16 rows of it where rows lie
apart), with `wanted`, what the tool expands it to: `mx.dequantize` of scales and biases in float32, `.dequantize()` of
torchao's tensor, `dequantize_fp8` of GPTQModel in float32. Where a tool expands nothing on a CPU, `original` is the
matrix before. The metadata of a file names the tool and its version, and holds its `quantization_config`.
"""

import subprocess
import sys
from pathlib import Path


def base(folder: Path) -> None:
    """The model: 2 layers of 128, weights of deviation 0.08, and any tokenizer beside it."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.08)
    model.save_pretrained(folder / "llama")


def mlx(folder: Path) -> None:
    """mlx-lm 0.32.2 on Linux: pip install mlx-lm 'mlx[cpu]'."""
    command = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(folder / "llama"), "-q"]
    for bits in (2, 3, 4, 5, 6, 8):
        path = str(folder / f"mlx-{bits}")
        subprocess.run([*command, "--mlx-path", path, "--q-bits", str(bits), "--q-group-size", "32"], check=True)
    for mode in ("mxfp4", "mxfp8", "nvfp4"):
        subprocess.run([*command, "--mlx-path", str(folder / f"mlx-{mode}"), "--q-mode", mode], check=True)


def torchao(folder: Path) -> None:
    """torchao 0.18.0."""
    import torch
    from torchao import quantization
    from transformers import AutoModelForCausalLM, TorchAoConfig

    kinds = {
        "int8": quantization.Int8WeightOnlyConfig(version=2),
        "fp8": quantization.Float8WeightOnlyConfig(),
        "intx4": quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32)),
    }
    for name, kind in kinds.items():
        options = TorchAoConfig(kind)
        model = AutoModelForCausalLM.from_pretrained(
            folder / "llama", quantization_config=options, dtype=torch.bfloat16
        )
        model.save_pretrained(folder / f"ao-{name}")


def gptqmodel(folder: Path) -> None:
    """GPTQModel 7.7.0, with GPTQMODEL_CPU_WORKERS=2."""
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import FP8Config

    texts = [f"def main(x): return x + 1 # some text that is long enough for the calibration, {n}" for n in range(64)]
    kinds = {"fp8": FP8Config(), **{str(bits): QuantizeConfig(bits=bits, group_size=32) for bits in (2, 3)}}
    for name, kind in kinds.items():
        model = GPTQModel.load(str(folder / "llama"), kind, device="cpu")
        model.quantize(texts, batch_size=8)
        model.save(str(folder / f"gptqm-{name}"))


def autoround(folder: Path) -> None:
    """AutoRound 0.16.1, rounded to nearest: it needs no texts then."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    schemes = {"w2": "W2A16", "w3": "W3A16", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "fp8": "FP8_BLOCK"}
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    for name, scheme in schemes.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype="bfloat16")
        group = 32 if name in ("w2", "w3") else None
        options = {"iters": 0, "disable_opt_rtn": True, "group_size": group, "device_map": "cpu"}
        AutoRound(model, tokenizer, scheme=scheme, **options).quantize_and_save(
            str(folder / f"auto-{name}"), format="auto_round"
        )


if __name__ == "__main__":
    {maker.__name__: maker for maker in (base, mlx, torchao, gptqmodel, autoround)}[sys.argv[1]](Path(sys.argv[2]))
