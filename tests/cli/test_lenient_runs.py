"""`--lenience` at the command line: said aloud, never proved, and off unless it is asked for."""

import json
from pathlib import Path

import pytest
from shell import shell

from offload.bench.harness.models import resident_pair
from offload.checkpoint.packaged import PAIR
from offload.cli.console import Console
from offload.cli.demo import demo_options
from offload.cli.demo_run import compare, open_demo
from offload.errors import UserError
from offload.options import OutputOptions
from offload.planning.load_options import LoadOptions
from offload.reports.tune import tune
from offload.sampling_options import Sampling

RUN = ("generate", "-m", str(PAIR / "target"), "-d", str(PAIR / "draft"), "--raw", "-p", "import", "-n", "12")
HOW = ("--tree", "chain:3", "--context", "64", "--temp", "0")


def test_it_is_said_on_stderr_and_in_the_json() -> None:
    for flags, is_exact in (((), True), (("--lenience", "1"), True), (("--lenience", "0.2"), False)):
        shown, told = shell(*RUN, *HOW, *flags), shell(*RUN, *HOW, *flags, "--json")
        assert shown.code == told.code == 0, shown.err + told.err
        lines = [line for line in shown.err.splitlines() if line.startswith("NOT EXACT: --lenience 0.2 accepts")]
        assert len(lines) == (not is_exact) and told.err == ""
        result = json.loads(told.out)
        assert result["is_exact"] is is_exact and result.get("lenience", 1.0) == (1.0 if is_exact else 0.2)
        assert is_exact or result["is_invariant"] is False
        assert result["stats"]["alpha"]["num_positions"] > 0


def test_nobody_proves_or_tunes_what_is_not_exact(tmp_path: Path) -> None:
    options = demo_options("1GiB", "chain:3", lenience=0.5)
    with (
        open_demo(PAIR / "target", options, Console(OutputOptions(quiet=True))) as decoder,
        pytest.raises(UserError, match="proved"),
    ):
        compare(decoder, "import", Sampling(), num_tree=2, show=lambda _, run: print(*run))
    with pytest.raises(UserError, match="what is measured is proved: `lenience` must be 1"):
        resident_pair(None).open("chain:3", lenience=0.5)
    text = tmp_path / "text"
    text.write_text("import os\n" * 200)
    with pytest.raises(UserError, match="`lenience` must be 1 for a profile"):
        tune(str(PAIR / "target"), str(PAIR / "draft"), [text], Sampling(), LoadOptions(lenience=0.5))
