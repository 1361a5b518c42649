"""In a rehearsal: rows whose demonstrations the thin model has learned, or a file's first pairs, in place of the data;
a server on this machine in the judge's."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tasks.data.pairs import read_pairs
from verl_tasks.data.prepare import load_tokenizer, needs_tools
from verl_tasks.evaluation.certify import cut_by
from verl_tasks.models import thin
from verl_tasks.models.chat_template import demonstration_ids
from verl_tasks.rows import demonstration, dpo_row, dpo_schema, solved, tools_of, write_parquet
from verl_tasks.settings import Settings

READ = 4096  # demonstrations in which it looks


def taught(s: Settings, train: Path, demonstrations: Path, model: Path, out: Path, wanted: range) -> tuple[int, float]:
    """Teach the thin model ``model`` the demonstrations of the first rows of ``train`` that no limit of ``s``, the
    settings that are played, cuts. Write these rows to ``out``, a parquet file. ``wanted``: how many rows.

    Returns how many it was taught, and the mean probability with which it samples one; 0 and 0.0, and without ``out``,
    where there are too few rows. Raises DataError and ValueError as what reads them.
    """
    tokenizer, places, learned = load_tokenizer(str(model)), [], []
    for place, _, own in solved(train, demonstrations, READ):
        ids, mask = demonstration_ids(tokenizer, *demonstration(own), tools_of(own))
        if not cut_by(s, mask):
            places.append(place)
            learned.append((ids, mask))
        if len(places) == wanted[-1]:
            break
    if len(places) < wanted[0]:
        return 0, 0.0
    right = thin.teach(model, learned, s.SEED)
    pq.write_table(pq.read_table(train).take(pa.array(places)), out)
    return len(places), right


def first_pairs(source: str, out: Path, most: int, columns: dict[str, str] | None = None) -> int:
    """Write the first ``most`` pairs of PAIRS_FILE to ``out`` as our own file; their number. Raises DataError."""
    pairs = [pair for _, pair in islice(read_pairs(Path(source).expanduser(), columns), 2 * most) if pair][:most]
    return write_parquet(map(dpo_row, pairs), out, dpo_schema(any(map(needs_tools, pairs)), truncated=True))


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
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
def judge() -> Iterator[str]:
    """The base URL of an OpenAI-compatible server that stands for the judge, until the end. The score follows from a
    digest of the request, so that scores differ, and one request always gets the same."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
