"""A plugin of pytest: each test becomes a row as soon as it is over.

Use `-p offload.bench.gpu.pytest_rows --rows FILE`.
"""

from pathlib import Path
from typing import Any

from offload.bench.harness.record import add_row
from offload.bench.harness.tables import row


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--rows", type=Path, metavar="FILE", help="append a line of JSON for each test"
    )


def pytest_configure(config: Any) -> None:
    """Register only where tests are handed out: workers of xdist report to that process."""
    if config.option.rows is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Rows(config.option.rows))


class _Rows:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that was run, or something around it that broke or was skipped."""
        if report.when == "call" or not report.passed:
            self._add(report, report.duration)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot even be read is a row as well."""
        if report.failed:
            self._add(report, 0.0)

    def _add(self, report: Any, seconds: float) -> None:
        is_met = {"passed": True, "failed": False}.get(report.outcome)
        outcome = row(f"test {report.nodeid}", seconds, "s") | {"is_met": is_met}
        if report.failed:
            outcome["error"] = str(report.longrepr).strip().splitlines()[-1][:200]
        add_row(self._path, outcome)
