"""The whole program: the command line, and the bench as one of its commands.

Neither imports the other; this module alone imports both.
"""

from offload.bench.suite import app as bench
from offload.cli.app import app, every_command
from offload.cli.main import main

app.add_typer(bench, name="bench")

__all__ = ["app", "every_command", "main"]
