"""An engine that asks an OpenAI-compatible endpoint: `make eval BASE_URL=https://... MODEL_NAME=name`."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from verl_tasks.evaluation.engines import SKIPPED, Request, Sampling
from verl_tasks.evaluation.rollouts import GREEDY, Completion
from verl_tasks.models.chat_template import call_text
from verl_tasks.openai_client import address_problem, openai_client
from verl_tasks.settings import SettingsError
from verl_tasks.text import one_line

KEY = "OPENAI_API_KEY"  # from the environment alone; it stands in no record
IN_FLIGHT = 16  # requests at a time
RETRIES = 6  # of the client: after lost connections, 408, 409, 429 and 5xx, with Retry-After or a growing pause
SECONDS = 300.0  # for one request
MAX_CHARS = 1_000_000  # of a response; a longer one is cut


def check(base_url: str, name: str) -> None:
    """Raise SettingsError where BASE_URL or MODEL_NAME cannot be asked."""
    if problem := address_problem(base_url, KEY):
        raise SettingsError(f"BASE_URL: {problem}")
    if not name:
        raise SettingsError("MODEL_NAME is empty: give the name by which BASE_URL knows the model")


class Pace:
    """At most ``per_minute`` requests begin in a minute, evenly; 0: no limit."""

    def __init__(self, per_minute: float):
        self.gap, self.next, self.lock = 60 / per_minute if per_minute else 0.0, 0.0, threading.Lock()

    def wait(self) -> None:
        with self.lock:
            begins = max(time.monotonic(), self.next)
            self.next = begins + self.gap
        time.sleep(max(0.0, begins - time.monotonic()))


class EndpointEngine:
    """The model ``name`` at ``base_url``; ``used`` counts the tokens that its user pays for."""

    def __init__(self, base_url: str, name: str, per_minute: float = 0):
        self.client = openai_client(base_url, os.environ.get(KEY, ""), SECONDS, RETRIES)
        self.name, self.pace = name, Pace(per_minute)
        self.used, self.counting = Counter(), threading.Lock()

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[tuple[Request, list[Completion]]]:
        """Each request with its completions, in the order in which they end. No endpoint tells a response's entropy:
        None. Raises SettingsError for a refusal that another attempt cannot help."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            asked = {pool.submit(self._completions, request, sampling): request for request in requests}
            try:
                for done in as_completed(asked):
                    yield asked[done], done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _completions(self, request: Request, sampling: Sampling) -> list[Completion]:
        """One call for each sample: not every endpoint knows ``n``."""
        greedy, seed = request.mode == GREEDY, request.seed(sampling.seed)
        numbers = range(1 if greedy else sampling.n)
        how = {"temperature": 0.0} if greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p}
        found = [self._ask(request, sampling, how | {"seed": (seed + number) % 2**31}) for number in numbers]
        return [SKIPPED] if None in found else found

    def _ask(self, request: Request, sampling: Sampling, how: dict) -> Completion | None:
        """None where the prompt is longer than the model's window."""
        import openai

        self.pace.wait()
        tools = {"tools": request.tools} if request.tools else {}
        try:
            answer = self.client.chat.completions.create(
                model=self.name, messages=request.messages, max_tokens=sampling.max_tokens, **how, **tools
            )
        except openai.BadRequestError as error:
            if "context" in str(error).lower():
                return None
            raise SettingsError(f"MODEL_NAME={self.name}: {_said(error)}") from None
        except openai.OpenAIError as error:
            raise SettingsError(f"MODEL_NAME={self.name}: {type(error).__name__}: {_said(error)}") from None
        if not answer.choices:
            raise SettingsError(f"MODEL_NAME={self.name}: answered without a choice")
        choice, used = answer.choices[0], answer.usage
        tokens = used.completion_tokens if used else 0
        with self.counting:  # of IN_FLIGHT threads
            self.used.update(requests=1, prompt_tokens=used.prompt_tokens if used else 0, response_tokens=tokens)
        reason = "length" if choice.finish_reason == "length" else "stop"
        return Completion(text_of(choice.message)[:MAX_CHARS], reason, tokens, None)

    def close(self) -> None:
        self.client.close()


def _said(error: Exception) -> str:
    """What the endpoint said, on one line, without the key."""
    return one_line(str(error).replace(os.environ.get(KEY) or "\0", "(key)"), 300)


def text_of(message) -> str:
    """The message as a model writes it: thought in ``<think>``, calls of tools in ``<tool_call>`` (Hermes's form)."""
    thought = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    calls = [_call(each.function) for each in message.tool_calls or () if each.type == "function"]
    parts = [f"<think>\n{thought}\n</think>" if isinstance(thought, str) else "", message.content or "", *calls]
    return "\n".join(filter(None, parts))


def _call(function) -> str:
    try:
        arguments = json.loads(function.arguments)
    except ValueError:
        arguments = function.arguments
    return call_text({"name": function.name, "arguments": arguments})
