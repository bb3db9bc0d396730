#!/usr/bin/env python3
"""Make the pictures of README and docs: the demo in a terminal, and the chat page with the packaged pair.

    .venv/bin/python .ci/pictures.py demo page

Both run the program as a user does. The demo's picture is an SVG that plays in a browser, at the speed of the
recording but for waits of more than a second; where nothing plays it shows the end. Invariant: nothing is drawn that
was not on the screen.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "pictures"
PROGRAM = [sys.executable, "-m", "offload"]
COLUMNS, ROWS = 98, 34
CHAR, LINE, MARGIN = 7.8, 18, 16
LONGEST_WAIT_S = 1.0
LAST_S = 2.0
QUESTION = "What is a generator?"
START_S, ANSWER_S = 300, 120


class Chunk(NamedTuple):
    """Text that came at one moment."""

    time_s: float
    text: str
    is_output: bool  # of standard output; else of standard error


def recorded(command: list[str]) -> Iterator[Chunk]:
    """Yield what a command writes, as it comes; its own waits are cut."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        streams = {process.stdout.fileno(): True, process.stderr.fileno(): False}
        now = last = time.monotonic()
        shown_s = 0.0
        while streams:
            ready, _, _ = select.select(list(streams), [], [])
            now, before = time.monotonic(), last
            shown_s, last = shown_s + min(now - before, LONGEST_WAIT_S), now
            for stream in ready:
                data = os.read(stream, 1 << 16)
                if data:
                    yield Chunk(shown_s, data.decode(errors="replace"), streams[stream])
                else:
                    del streams[stream]
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")


class Piece(NamedTuple):
    """A part of one row of the screen."""

    row: int
    column: int
    chunk: Chunk


def laid_out(chunks: list[Chunk]) -> list[Piece]:
    """Return where each chunk's parts stand; rows that are too long go on in the next one."""
    pieces, row, column = [], 0, 0
    for chunk in chunks:
        for part in re.findall(r"\n|[^\n]+", chunk.text.expandtabs(8)):
            if part == "\n":
                row, column = row + 1, 0
            while part.strip("\n"):
                room = COLUMNS - column
                pieces.append(Piece(row, column, chunk._replace(text=part[:room])))
                column, part = column + len(part[:room]), part[room:]
                if part:
                    row, column = row + 1, 0
    return pieces


def drawn(pieces: list[Piece]) -> str:
    """Return the SVG: each piece appears at its moment, and rows move up when there are too many."""
    num_rows = 1 + max(piece.row for piece in pieces)
    num_shown = min(num_rows, ROWS)
    width, height = 2 * MARGIN + COLUMNS * CHAR, 2 * MARGIN + num_shown * LINE
    texts = []
    for row, column, (time_s, text, is_output) in pieces:
        if text.strip():
            place = f'x="{MARGIN + column * CHAR:.1f}" y="{MARGIN + row * LINE + 13}"'
            place += f' textLength="{len(text) * CHAR:.1f}"'
            kind = "o" if is_output else "e"
            texts.append(
                f'<text class="{kind}" {place} style="animation-delay:{time_s:.2f}s">{escape(text)}</text>'
            )
    end_s = pieces[-1].chunk.time_s + LAST_S
    moves = []
    for piece in pieces:
        up = max(0, piece.row + 1 - ROWS)
        if not moves or up > moves[-1][1]:
            moves.append((100 * piece.chunk.time_s / end_s, up))
    steps = "".join(f"{at:.2f}%{{transform:translateY({-up * LINE}px)}}" for at, up in moves)
    final = -(num_rows - num_shown) * LINE
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size}>
<style>
text{{font:13px ui-monospace,Menlo,"DejaVu Sans Mono",monospace;white-space:pre;animation:show 1ms backwards}}
.o{{fill:#ebe8e2}}.e{{fill:#9c968c}}
@keyframes show{{from{{visibility:hidden}}to{{visibility:visible}}}}
@keyframes move{{{steps}100%{{transform:translateY({final}px)}}}}
#rows{{transform:translateY({final}px);animation:move {end_s:.2f}s step-end backwards}}
</style>
<rect width="100%" height="100%" rx="10" fill="#191816"/>
<clipPath id="screen"><rect x="0" y="{MARGIN - 4}" width="100%" height="{num_shown * LINE + 8}"/></clipPath>
<g clip-path="url(#screen)"><g id="rows" xml:space="preserve">
{chr(10).join(texts)}
</g></g>
</svg>
"""


def demo() -> None:
    """Record the demo; its target is made by a run before, which is not shown."""
    subprocess.run(
        [*PROGRAM, "demo", "-n", "2", "--quiet"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    prompt = Chunk(0.0, "$ offload demo\n", True)
    chunks = [
        prompt,
        *(one._replace(time_s=one.time_s + 0.7) for one in recorded([*PROGRAM, "demo"])),
    ]
    (OUT / "demo.svg").write_text(drawn(laid_out(chunks)), encoding="utf-8")


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Yield the address of `offload serve --demo`."""
    command = [*PROGRAM, "serve", "--demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"chat page +(http://\S+)", line):
                    yield found[1]
                    break
            else:
                raise SystemExit("".join(lines))
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()


def page() -> None:
    """Take the page at three widths, and keep the widest for the documents."""
    sys.path.insert(0, str(ROOT / "tests" / "server"))
    from headless import Chromium, find_chromium
    from PIL import Image
    from playwright.sync_api import sync_playwright

    found = find_chromium()
    if not isinstance(found, Chromium):
        raise SystemExit(found)
    seen = Path(os.environ.get("SEEN", "/tmp"))
    with served() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found.executable, env=found.environment)
        for name, width, height in (("wide", 1240, 760), ("middle", 800, 760), ("phone", 390, 844)):
            context = browser.new_context(
                viewport={"width": width, "height": height}, device_scale_factor=1.5
            )
            tab = context.new_page()
            tab.goto(address)
            tab.locator("#model", has_text="chat-").wait_for(timeout=START_S * 1000)
            tab.screenshot(path=seen / f"{name}-start.png")
            tab.fill("#question", QUESTION)
            tab.press("#question", "Enter")
            tab.locator(".figures").wait_for(timeout=ANSWER_S * 1000)
            if width < 1120:
                tab.screenshot(path=seen / f"{name}-answer.png")
                tab.locator("#show-passes").click()
            # one that kept about five: its tokens have room for their texts
            tab.evaluate("""() => {
                const far = one => Math.abs(gainOf(one) - 6);
                choose(passesNow().reduce((best, one, i, all) => far(one) < far(all[best]) ? i : best, 0));
            }""")
            tab.screenshot(path=seen / f"{name}.png")
            context.close()
        browser.close()
    with Image.open(seen / "wide.png") as picture:
        picture.convert("RGB").quantize(96).save(OUT / "page.png", optimize=True)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    for wanted in sys.argv[1:] or ["demo", "page"]:
        {"demo": demo, "page": page}[wanted]()
