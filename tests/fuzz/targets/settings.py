"""What stands in for flags, and what describes machines: profiles, hardware, config.toml, the environment."""

import json
import os
from functools import partial
from pathlib import Path

import torch
from case import Target
from damage import BYTES, JSON, flip, only, other, special, text
from model_files import ENOUGH, as_wanted, keep_wanted, save_files
from shell import Outcome, shell

from offload.checkpoint.open import open_checkpoint
from offload.cli.serve_command import read_keys
from offload.planning.acceptance import DynamicYield
from offload.planning.cost_model import Costs, Curve
from offload.planning.profile import ExpertUses, Identity, Machine, Profile, format_json
from offload.sampling_options import Sampling

_MACHINE = {"name": "mine", "gpu_bytes": "24GiB", "memory_bytes_per_s": "1000GB/s", "flops_per_s": 165e12,
    "link_bytes_per_s": 25e9, "ram_bytes": "64GiB", "disk_bytes_per_s": "3GB/s", "memory_share": 0.8,
    "flops_share": 0.6}  # fmt: skip
_TOML = """model = "model"
ram = "400MiB"
context = 64
threads = 1
profile = "none"
[plan]
disk-speed = "1GB"
[generate]
tree = "none"
logit-bias = ["5:1.5"]
temp = 0.5
"""
_HOSTILE_TOML = ("[" * 5000, "a = " + "[" * 5000, "ram = nan", "ram = inf", "context = 1979-05-27T07:32:00Z",
    "model = [\"a\"]", "[generate.ram]\nx = 1", "context = 99999999999999999999999", "context = -1", "ram = [[[]]]",
    "tree = [1, [2]]", "quiet = \"maybe\"", "seed = 0x7fffffffffffffffff", "[generate]\nfile = \"/etc/passwd\"",
    "[[generate]]\nram = 1",
    "threads = 1e400", "a.b.c = 1", "ranks = \"x\"", "logit-bias = [[1]]", "help = true")  # fmt: skip
_PROFILE_KEYS = ("schema", "identity", "identity.machine", "identity.target", "target_name", "created", "num_tokens",
    "acceptance", "standard_error", "num_threads", "costs", "costs.compute_s", "costs.draft_step_s",
    "costs.verify_s", "costs.link_bytes_per_s", "dynamic_yields", "expert_uses", "x")  # fmt: skip
_VARIABLES = ("OFFLOAD_RAM", "OFFLOAD_CONTEXT", "OFFLOAD_MODEL", "OFFLOAD_TREE", "OFFLOAD_TEMP", "OFFLOAD_RANKS",
    "OFFLOAD_THREADS", "OFFLOAD_PROFILE", "OFFLOAD_SEED", "OFFLOAD_LOGIT_BIAS", "OFFLOAD_QUIET", "OFFLOAD_DATASTORE",
    "OFFLOAD_DEVICE", "OFFLOAD_DTYPE", "OFFLOAD_SESSION", "OFFLOAD_RULE", "OFFLOAD_LOOKUP", "OFFLOAD_NO_LOOKUP",
    "OFFLOAD_STOP", "OFFLOAD_OUT", "OFFLOAD_GRAMMAR", "XDG_CACHE_HOME", "COLUMNS", "RANK", "WORLD_SIZE", "NO_COLOR",
    "TERM", "HF_HUB_OFFLINE")  # fmt: skip


def _save_profile(folder: Path) -> None:
    target, draft = save_files(folder / "target"), save_files(folder / "draft")
    machine = Machine.here("float32")
    identity = Identity.from_models(open_checkpoint(target), open_checkpoint(draft), Sampling(), "match", machine)
    costs = Costs(compute_s=Curve((1, 16, 64), (0.1, 0.12, 0.2)), draft_step_s=Curve((1, 8), (0.001, 0.002)),
        verify_s=0.001, link_bytes_per_s=1e9)  # fmt: skip
    known = Profile(identity=identity, target_name="target", draft_name="draft", created="2026-01-01T00:00:00+00:00",
        num_tokens=6, acceptance=(0.5, 0.25), standard_error=(0.1, 0.05),
        num_threads=1, costs=costs, expert_uses=ExpertUses(((1, 2), (2, 1)), 2),
        dynamic_yields=(DynamicYield(num_nodes=16, depth=8, tokens_per_sweep=2.5, num_sweeps=40),))  # fmt: skip
    (folder / "profile.json").write_text(format_json(known.as_dict()))
    keep_wanted(folder, _write_by_profile(folder))


def _write_by_profile(folder: Path) -> Outcome:
    named = ("-m", folder / "target", "-d", folder / "draft", "--profile", folder / "profile.json")
    shown = ("-p", "Count: a", "-n", 4, "--greedy", "--quiet", *ENOUGH[:6])
    return shell("generate", *named, *shown)


def _write_as_ever(folder: Path) -> Outcome:
    """A profile shapes the tree, and decides nothing."""
    return as_wanted(folder, _write_by_profile(folder))


def _save_machines(folder: Path) -> None:
    save_files(folder / "model")
    (folder / "machine.json").write_text(json.dumps(_MACHINE))


def _plan_hardware(folder: Path) -> Outcome:
    return shell("plan", "-m", folder / "model", "--hardware", folder / "machine.json")


def _save_defaults(folder: Path) -> None:
    save_files(folder / "model")
    (folder / "offload").mkdir()
    (folder / "offload" / "config.toml").write_text(_TOML)
    variables = {"OFFLOAD_RAM": "300MiB", "OFFLOAD_TREE": "none", "OFFLOAD_SEED": "3"}
    (folder / "variables.json").write_text(json.dumps(variables))


def _by_defaults(folder: Path, command: tuple[object, ...]) -> Outcome:
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    os.chdir(folder)
    return shell(*command)


def _generate_by_variables(folder: Path) -> Outcome:
    """What no environment can hold is left out."""
    try:
        variables = json.loads((folder / "variables.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        variables = {}
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if name in _VARIABLES and "\0" not in str(value):
            os.environ[name] = str(value)[:100_000].encode("utf-8", "replace").decode()
    return shell(*_WRITE, "-m", folder / "model", "--threads", 1, "--context", 64, "--profile", "none")


def _save_keys(folder: Path) -> None:
    (folder / "keys.txt").write_text("first-key\nsecond-key\n")


def _read_keys(folder: Path) -> None:
    """An empty one would let anyone in."""
    assert all(key.split() == [key] for key in read_keys(folder / "keys.txt", "0.0.0.0"))


torch.set_num_threads(1)
_TOML_FILES = {"offload/config.toml": (text, text, flip, special, other(*_HOSTILE_TOML))}
_WRITE = ("generate", "-p", "Count: a", "-n", 2)
TARGETS = [
    Target("settings/profile", _save_profile, {"profile.json": (only(*_PROFILE_KEYS), *JSON)}, _write_as_ever),
    Target("settings/hardware", _save_machines, {"machine.json": (only(*_MACHINE, "x"), *JSON)}, _plan_hardware),
    Target("settings/toml", _save_defaults, _TOML_FILES, partial(_by_defaults, command=_WRITE)),
    Target("settings/toml-plan", _save_defaults, _TOML_FILES, partial(_by_defaults, command=("plan",))),
    Target("settings/variables", _save_defaults, {"variables.json": (only(*_VARIABLES),)}, _generate_by_variables),
    Target("settings/keys", _save_keys, {"keys.txt": (text, special, *BYTES)}, _read_keys),
]
