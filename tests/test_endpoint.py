"""`make eval BASE_URL=`: an OpenAI-compatible endpoint as an engine."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import pytest

from verl_tasks import openai_client
from verl_tasks.evaluation import endpoint
from verl_tasks.evaluation.engines import Request, Sampling
from verl_tasks.settings import SettingsError

HOW = Sampling(n=3, greedy=True, temperature=0.7, top_p=0.9, max_prompt_tokens=50, max_tokens=9, seed=1)
KEY = "sk-" + "NobodysBusiness0" * 3
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def asking(text: str, index: int = 0, mode: str = "sampled", tools=None) -> Request:
    return Request(index, mode, [{"role": "user", "content": text}], tools)


@pytest.fixture
def server():
    """Answers with the question and its seed; ``replies`` come first, each a status and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.headers["Authorization"], body))
            message = {"role": "assistant", "content": f"{body['messages'][-1]['content']} {body['seed']}"}
            answer = {
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "object": "chat.completion",
            }
            answer |= {
                "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
                "id": "1",
                "model": "m",
            }
            status, said = self.server.replies.pop(0) if self.server.replies else (200, answer)
            content = json.dumps(said if "choices" in said or status != 200 else answer | said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.server.write(self.wfile, content)

        def log_message(self, *what):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.replies, made.write = [], [], lambda file, content: file.write(content)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def engine(server, monkeypatch):
    monkeypatch.setenv(endpoint.KEY, KEY)
    made = endpoint.EndpointEngine(f"http://127.0.0.1:{server.server_port}/v1", "m")
    yield made
    made.close()


def test_each_sample_is_a_call_with_a_seed_of_its_own_and_greedy_is_one(engine, server):
    found = list(engine.generate([asking("a"), asking("b", 1), asking("b", 1, "greedy")], HOW))
    assert sorted(len(completions) for _, completions in found) == [1, 3, 3]
    every = [each for _, completions in found for each in completions]
    of_a = {each.response for each in every if each.response.startswith("a")}
    assert len(of_a) == 3 and all(each.entropy is None and each.tokens == 2 for each in every)
    assert engine.used == {"requests": 7, "prompt_tokens": 35, "response_tokens": 14}
    (greedy,) = [body for _, body in server.asked if body["temperature"] == 0]
    assert "top_p" not in greedy and all(body["max_tokens"] == 9 for _, body in server.asked)
    assert {key for key, _ in server.asked} == {f"Bearer {KEY}"}
    ((_, again),) = engine.generate([asking("a")], HOW)
    assert {each.response for each in again} == of_a


def test_a_busy_server_is_asked_again_and_a_refusal_is_one_line(engine, server):
    server.replies += [(429, {"error": {"message": "slow down"}}), (503, {"error": {"message": "busy"}})]
    assert len(list(engine.generate([asking("a", mode="greedy")], HOW))) == 1
    assert len(server.asked) == 3
    server.replies.append((401, {"error": {"message": f"wrong key\n{KEY}"}}))
    with pytest.raises(SettingsError, match=r"^MODEL_NAME=m: AuthenticationError: [^\n]*$") as refused:
        list(engine.generate([asking("a", mode="greedy")], HOW))
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("said", ["more than", "does not end"])
def test_a_reply_without_an_end_ends(server, said, monkeypatch):
    def drip(file, content):
        for byte in content:
            file.write(bytes([byte]))
            file.flush()
            time.sleep(0.02)

    monkeypatch.setattr(openai_client, "MOST_BYTES", 5 if said == "more than" else 10**6)
    server.write = drip
    client = openai_client.openai_client(f"http://127.0.0.1:{server.server_port}/v1", "", 0.5, 0)
    began = time.monotonic()
    with pytest.raises((openai.APIConnectionError, openai.APITimeoutError)) as ended:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}], seed=1)
    assert said in str(ended.value.__cause__) and time.monotonic() - began < 3


def test_a_prompt_that_the_model_cannot_hold_is_counted_and_not_asked_again(engine, server):
    server.replies.append((400, {"error": {"message": "maximum context length is 50 tokens"}}))
    ((_, (skipped,)),) = engine.generate([asking("a", mode="greedy")], HOW)
    assert skipped.finish_reason == "prompt_too_long" and len(server.asked) == 1


def test_thought_and_calls_stand_as_a_model_writes_them(engine, server):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    server.replies.append((200, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}))
    ((_, (found,)),) = engine.generate([asking("a", mode="greedy", tools=TOOLS)], HOW)
    text = '<think>\nhm\n</think>\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert found.response == text and found.finish_reason == "stop"
    assert server.asked[0][1]["tools"] == TOOLS


def test_the_pace_is_kept():
    pace, began = endpoint.Pace(600), time.monotonic()
    for _ in range(4):
        pace.wait()
    assert 0.3 <= time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("url", "name", "said"),
    [
        ("host/v1", "m", "must be http"),
        ("file:///etc/passwd", "m", "must be http"),
        ("https://me:secret@host/v1", "m", "a key goes into OPENAI_API_KEY"),
        ("https://host/v1?key=secret", "m", "a key goes into OPENAI_API_KEY"),
        ("https://host/v1", "", "MODEL_NAME is empty"),
    ],
)
def test_what_cannot_be_asked_is_refused_without_its_secret(url, name, said):
    with pytest.raises(SettingsError, match=said) as refused:
        endpoint.check(url, name)
    assert "secret" not in str(refused.value)
