#!/usr/bin/env bash
# The Responses protocol ends a stream with `response.completed`, or with `response.incomplete` where `max_output_tokens` cut
# the answer. `get_final_response()` of a stream should return the response in both cases, as `responses.create` does.
# Seen (openai 3.57.0): behind `response.incomplete` it raises RuntimeError, for it waits for `response.completed` alone; the
# text that was written is lost to whoever asks for the response and has not kept the events.
# Why it matters: a server that ends cut answers as the protocol says breaks clients that ask for the final response.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check openai==3.57.0
cat > "$work/run.py" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import openai

BASE = {"id": "r", "object": "response", "created_at": 1, "model": "m", "output": [], "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": []}


def events(last):
    message = {"id": "m", "type": "message", "role": "assistant", "status": last, "content": []}
    place = {"item_id": "m", "output_index": 0, "content_index": 0}
    text = {"type": "output_text", "text": "par", "annotations": []}
    yield "response.created", {"response": {**BASE, "status": "in_progress"}}
    yield "response.output_item.added", {"output_index": 0, "item": message}
    yield "response.content_part.added", {**place, "part": {**text, "text": ""}}
    yield "response.output_text.delta", {**place, "delta": "par", "logprobs": []}
    yield "response.output_text.done", {**place, "text": "par", "logprobs": []}
    yield f"response.{last}", {"response": {**BASE, "status": last, "output": [{**message, "content": [text]}]}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number, (kind, data) in enumerate(events(asked["input"])):
            line = json.dumps({"type": kind, "sequence_number": number, **data})
            self.wfile.write(f"event: {kind}\ndata: {line}\n\n".encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
seen = {}
for last in ("completed", "incomplete"):
    with client.responses.stream(model="m", input=last) as stream:
        kinds = [event.type for event in stream]
        assert kinds[-1] == f"response.{last}", kinds
        try:
            seen[last] = stream.get_final_response().output_text
        except RuntimeError as error:
            seen[last] = f"RuntimeError: {error}"
print(seen)
assert seen["completed"] == "par" and seen["incomplete"].startswith("RuntimeError"), seen
print("as it was seen")
PY
"$work/env/bin/python" "$work/run.py"
