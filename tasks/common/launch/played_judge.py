"""In a rehearsal: an OpenAI-compatible server on this machine in the judge's place. The score follows from a digest of
the request, so that scores differ, and one request always gets the same."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    request_queue_size = 128


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        verdict = {"reason": "by a rehearsal", "score": hashlib.sha256(request).digest()[0] % 10}
        message = {"role": "assistant", "content": json.dumps(verdict)}
        usage = {"prompt_tokens": len(request) // 4, "completion_tokens": 16}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments):
        pass


@contextmanager
def serving() -> Iterator[str]:
    """The base URL of such a judge, on this machine alone, until the end."""
    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
