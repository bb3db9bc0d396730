"""The whole program: the command line, and the bench as one of its commands.

Neither imports the other, so that both are known here alone.
"""

from offload.bench.suite import app as bench
from offload.cli.app import app

# before the commands register themselves: --help keeps this order
app.add_typer(bench, name="bench", short_help="Measure speeds, each beside its ceiling.")

from offload.cli.main import main  # noqa: E402

__all__ = ["app", "main"]
