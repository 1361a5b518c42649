"""In a rehearsal: an OpenAI-compatible server on this machine whose judge is the thin model.

A thin model writes no JSON. The reply's form is given, and the model fills in the score: a digit, sampled from the
model's probabilities, with a seed that is made of the request.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tasks.common.models.chat_template import prompt_ids

READ = 2048  # of the request's last tokens; the model has random weights
BEGUN = '{"reason": "by a thin model", "score": '
MOST_BYTES = 1_000_000  # of a request


class ThinJudge:
    """``reply`` answers a chat; safe in threads."""

    def __init__(self, folder: Path):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.begun = self.tokenizer(BEGUN, add_special_tokens=False)["input_ids"]
        self.digits = [self.tokenizer(str(n), add_special_tokens=False)["input_ids"][-1] for n in range(10)]
        self.lock = threading.Lock()

    def reply(self, messages: list[dict]) -> dict:
        """A chat completion. Raises ValueError where the chat template refuses ``messages``."""
        import torch

        ids = prompt_ids(self.tokenizer, messages)
        seed = int.from_bytes(hashlib.blake2b(json.dumps(messages).encode(), digest_size=8).digest()) >> 1
        with self.lock, torch.inference_mode():
            read = torch.tensor([[*ids[-READ:], *self.begun]])
            hidden = self.model.base_model(read).last_hidden_state[0, -1]
            chances = (self.model.get_output_embeddings().weight[self.digits] @ hidden).softmax(-1)
            score = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(seed)).item()
        message = {"role": "assistant", "content": f"{BEGUN}{score}}}"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(self.begun) + 2}
        return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The base URL of a judge that the model of ``folder`` plays, on this machine alone, until the end."""
    judge = ThinJudge(folder)

    class Handler(BaseHTTPRequestHandler):
        timeout = 60

        def do_POST(self):
            try:
                size = int(self.headers.get("Content-Length", 0))
                if not 0 < size <= MOST_BYTES:
                    raise ValueError(f"a request of {size} bytes")
                status, reply = 200, judge.reply(json.loads(self.rfile.read(size))["messages"])
            except (ValueError, LookupError, TypeError) as error:
                status, reply = 400, {"error": {"message": str(error)}}
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
