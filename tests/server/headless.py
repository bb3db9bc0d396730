"""A headless Chromium for tests: one of this machine, or one that is fetched once for all clones and needs no rights.

Why several ways: Playwright's own comes from a host that not every network reaches; Debian's comes from the mirror that
apt has been given. Invariant: where none can be had, it says why, and nothing outside of `FOLDER` has changed.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Read where this is imported: tests have caches of their own.
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload-tests" / "chromium"
PACKAGE = "chromium-headless-shell"
FETCH_S, LEAST_S = 180, 20  # waiting for a mirror; for a host that may not be reached at all


class Chromium(NamedTuple):
    """What Playwright is told to start."""

    executable: str
    environment: dict[str, str]


def find_chromium() -> Chromium | str:
    """A browser that starts, fetched where there is none; or the reason why there is none. One process at a time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _found()


def _found() -> Chromium | str:
    reasons = []
    for way in (_of_this_machine, _unpacked, _of_playwright, _of_debian):
        result = way()
        reason = _start(result) if isinstance(result, Chromium) else result
        if isinstance(result, Chromium) and reason is None:
            return result
        reasons.append(str(reason))
    return "no Chromium: " + "; ".join(reasons)


def _start(chromium: Chromium) -> str | None:
    """Why it does not start; None where it does."""
    from playwright.sync_api import Error, sync_playwright

    try:
        with sync_playwright() as playwright:
            playwright.chromium.launch(executable_path=chromium.executable, env={**chromium.environment}).close()
    except Error as error:
        return f"it does not start ({' '.join(str(error).split())[:120]})"
    return None


def _of_this_machine() -> Chromium | str:
    names = (PACKAGE, "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    result = next((path for name in names if (path := shutil.which(name))), None)
    return Chromium(result, dict(os.environ)) if result else "none in PATH"


def _of_playwright() -> Chromium | str:
    folder = FOLDER / "playwright"
    if not folder.exists():
        reason = _install(folder)
        if reason is not None:
            return f"`playwright install` {reason}"
    names = ("chrome-headless-shell", "headless_shell")
    results = [path for name in names for path in folder.glob(f"chromium_headless_shell-*/*/{name}")]
    return Chromium(str(results[0]), dict(os.environ)) if results else "`playwright install` has brought none"


def _install(folder: Path) -> str | None:
    command = [sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]
    part = FOLDER / "part"
    limit_s = FETCH_S if shutil.which("apt-get") is None else LEAST_S
    reason = _run(command, ROOT, limit_s, {**os.environ, "PLAYWRIGHT_BROWSERS_PATH": str(part)})
    if reason is None:
        part.rename(folder)
    shutil.rmtree(part, ignore_errors=True)
    return reason


def _of_debian() -> Chromium | str:
    """The package with the libraries that this machine lacks, unpacked and not installed."""
    reason = _unpack(FOLDER / "root")
    return _unpacked() if reason is None else reason


def _unpacked() -> Chromium | str:
    libraries = FOLDER / "root" / "usr" / "lib"
    if not libraries.exists():
        return "none unpacked"
    folders = [*libraries.glob("*-linux-gnu*"), *libraries.glob("*-linux-gnu*/pulseaudio")]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
    return Chromium(str(libraries / "chromium" / PACKAGE), environment)


def _unpack(root: Path) -> str | None:
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return "no apt-get to fetch one with"
    part = FOLDER / "part"
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    part.mkdir()
    try:
        apt_get, names = ["apt-get"], _packages(["apt-get"])
        if not names:  # an image may have no lists, or old ones
            apt_get = _with_own_lists()
            names = _packages(apt_get)
        if not names:
            return f"apt-get knows no {PACKAGE}"
        reason = _run([*apt_get, "download", *names], part, FETCH_S)
        for package in part.glob("*.deb"):
            reason = reason or _run(["dpkg", "-x", str(package), str(part / "root")], part, FETCH_S)
        if reason is None:
            (part / "root").rename(root)
        return None if reason is None else f"apt-get {reason}"
    finally:
        shutil.rmtree(part)


def _packages(apt_get: list[str]) -> list[str]:
    command = [*apt_get, "install", "--simulate", "--no-install-recommends", PACKAGE]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    return [line.split()[1] for line in text.splitlines() if line.startswith("Inst ")]


def _with_own_lists() -> list[str]:
    """Return an apt-get whose lists are of today and lie beside the browser, for which no rights are needed."""
    for name in ("lists/partial", "archives/partial"):
        (FOLDER / "apt" / name).mkdir(parents=True, exist_ok=True)
    options = {"Dir::State::lists": FOLDER / "apt" / "lists", "Dir::Cache": FOLDER / "apt"}
    apt_get = ["apt-get", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    _run([*apt_get, "update"], FOLDER, FETCH_S)
    return apt_get


def _run(command: list[str], folder: Path, limit_s: float, environment: dict[str, str] | None = None) -> str | None:
    """Why a command failed; None where it did not."""
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"took more than {limit_s:g} s"
    said = " ".join((done.stderr or done.stdout).split())
    return None if done.returncode == 0 else f"failed ({said[:120]})"
