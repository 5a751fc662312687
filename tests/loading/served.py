"""A server as the ``command`` loader starts it: ``python served.py PORT PATH [WHAT]``.

It answers ``/health`` with 503 for as long as the file at PATH says (seconds), then
with 200. ``WHAT``: ``crash`` ends with status 3 before that, ``deaf`` ignores SIGTERM,
``silent`` never becomes ready.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

port, path, what = int(sys.argv[1]), Path(sys.argv[2]), (sys.argv[3:] or [""])[0]
print("reading", path, flush=True)
load_s = float(path.read_text())
if what == "crash":
    sys.exit("out of memory")
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
ready_s = time.monotonic() + (3600.0 if what == "silent" else load_s)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ready = time.monotonic() >= ready_s
        said = {"status": "ok"} if ready else {"error": {"message": "Loading model", "code": 503}}
        if self.path == "/props" and ready:
            said = {"total_slots": 3}
        body = json.dumps(said).encode()
        self.send_response(200 if ready else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
