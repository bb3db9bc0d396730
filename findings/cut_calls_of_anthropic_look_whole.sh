#!/usr/bin/env bash
# Where `max_tokens` cuts a tool call, its arguments are a beginning of JSON. A client that hands them out parsed should keep only
# what is surely whole, or say that it is cut; strings that are cut are in fact left out, by design.
# Seen (anthropic 2.14.0): `messages.stream(...)` and `beta.messages.stream(...)` parse a number that is cut as it stands: of
# {"account": "alice", "amount": 1500} cut behind "15" the final message has an input of {"account": "alice", "amount": 15}.
# A cut `true` is left out, a cut list is closed. Nothing of it can be told from a whole call but by `stop_reason` of the message.
# Why it matters: an agent that looks at blocks of type `tool_use`, as its examples do, pays 15 in place of 1500, and the input
# satisfies the tool's schema. The raw text, in which the cut would show, is not in the message.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q --disable-pip-version-check anthropic==2.14.0
cat > "$work/run.py" <<'PY'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

CUT = {
    '{"account": "alice", "amount": 15': {"account": "alice", "amount": 15},  # of 1500
    '{"account": "ali': {},
    '{"sure": true, "really": tr': {"sure": True},
    '{"rows": [1, 2, 3': {"rows": [1, 2, 3]},  # of [1, 2, 30, 4]
    '{"share": 0.0': {"share": 0.0},  # of 0.05
}


def events(arguments):
    usage = {"input_tokens": 1, "output_tokens": 1}
    base = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    yield "message_start", {"message": {**base, "stop_reason": None, "stop_sequence": None}}
    yield "content_block_start", {"index": 0, "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}}}
    yield "content_block_delta", {"index": 0, "delta": {"type": "input_json_delta", "partial_json": arguments}}
    yield "content_block_stop", {"index": 0}
    yield "message_delta", {"delta": {"stop_reason": "max_tokens", "stop_sequence": None}, "usage": {"output_tokens": 9}}
    yield "message_stop", {}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for kind, data in events(asked["messages"][0]["content"]):
            self.wfile.write(f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode())

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)
for arguments, wanted in CUT.items():
    for messages in (client.messages, client.beta.messages):
        question = [{"role": "user", "content": arguments}]
        with messages.stream(model="m", max_tokens=9, messages=question) as stream:
            message = stream.get_final_message()
        (block,) = message.content
        assert (block.type, message.stop_reason) == ("tool_use", "max_tokens")
        assert block.input == wanted, (arguments, block.input)
    print(f"{arguments:36} is handed out as {block.input}")
PY
"$work/env/bin/python" "$work/run.py"
echo "as it was seen"
