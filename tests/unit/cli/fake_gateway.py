"""A gateway in the eyes of a stack: not ready when first asked, ready later, ends on SIGTERM.

python fake_gateway.py PORT
"""

import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import FrameType


class Handler(BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self) -> None:
        Handler.asked += 1
        self.send_response(200 if self.path == "/readiness" and Handler.asked > 2 else 503)
        self.end_headers()


def end(_number: int, _frame: FrameType | None) -> None:
    sys.stdout.write(f"drained at {time.monotonic()}\n")
    sys.stdout.flush()
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
