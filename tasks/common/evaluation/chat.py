"""`make chat`: talk to a model in the terminal."""

import contextlib
import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from verl_tasks.evaluation import chat_episode
from verl_tasks.evaluation.engines import VLLMEngine, window
from verl_tasks.evaluation.rollouts import Completion, scored
from verl_tasks.evaluation.sample import Scoring, bounds, episode_limits, model_name, sampling
from verl_tasks.process import StageFailed
from verl_tasks.rows import decoded, read_rows, tools_of
from verl_tasks.settings import Settings, artifacts
from verl_tasks.text import one_line, printable

HELP = "/sample: a prompt of the test set with its reward, /reset: a new conversation, /exit"


def task_system(rows: Iterable[dict]) -> list[dict]:
    """The system message of the task's test ``rows``, if any, in a list: the model was trained with it, so a
    conversation starts with it."""
    return next((chat_episode.system_of(row["prompt"]) for row in rows), [])


@contextlib.contextmanager
def engine_noise_to(log: Path) -> Iterator[TextIO]:
    """Send all that this process and its children print to ``log``; yields the terminal's standard output."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    saved = [os.dup(1), os.dup(2)]
    with log.open("wb") as file, os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace") as screen:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield screen
        finally:
            sys.stdout.flush()
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def talk(engine, how, rows: list[dict], system: list[dict], scoring: Scoring, lines: Iterator[str], screen) -> None:
    """The conversation: the user's ``lines`` until they end, with answers streamed to ``screen``."""
    messages, tools, choose = system, None, random.Random(how.seed)
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        if line == "/reset":
            messages, tools = system, None
            screen.write("(new conversation)\n")
        elif line == "/sample":
            index = choose.randrange(len(rows))
            row = rows[index]
            prompt = decoded(row["prompt"])
            screen.write(f"prompt {index}: {printable(prompt[-1]['content'])}\n")
            if (text := _answer(engine, how, prompt, tools_of(row), screen)) is not None:
                completion = Completion(text, "stop", 0, 0.0, engine.think_opened)
                rollout = scored(row, index, "chat", 0, completion, scoring.compute_score)
                reward = rollout.error or ", ".join(f"{k} {v:g}" for k, v in (rollout.reward or {}).items())
                screen.write(f"reward: {reward}\nground truth: {printable(rollout.ground_truth)}\n")
                messages, tools = [*prompt, {"role": "assistant", "content": text}], tools_of(row)
        elif line.startswith("/"):
            screen.write(HELP + "\n")
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            if (text := _answer(engine, how, asked, tools, screen)) is not None:
                messages = [*asked, {"role": "assistant", "content": text}]


def _answer(engine, how, messages: list[dict], tools: list[dict] | None, screen: TextIO) -> str | None:
    """The answer, streamed to ``screen``; None when there is none. Ctrl-C stops it."""
    text = None
    try:
        for piece in engine.stream(messages, how, tools):
            text = (text or "") + piece
            screen.write(printable(piece))
            screen.flush()
    except ValueError as error:
        screen.write(f"error: {error}")
    except KeyboardInterrupt:
        screen.write(" [stopped]")
    screen.write("\n")
    return text


def typed(screen: TextIO) -> Iterator[str]:
    """The lines that the user types, until Ctrl-D or Ctrl-C."""
    sys.stdin.reconfigure(errors="replace")  # bytes that are no UTF-8 would end the chat
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            screen.write("> ")
            screen.flush()
            if not (line := sys.stdin.readline()):
                break
            yield line
    screen.write("\n")


def chat(s: Settings, scoring: Scoring, model: str) -> int:
    """Load ``model`` and talk until /exit or the end of the input."""
    from torch import distributed

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # Ctrl-C stops an answer; an engine's own process it would end
    log = artifacts() / "chat" / s.TASK / "engine.log"
    rows = list(read_rows(s.data_dir / "test.parquet"))
    print(f"loading {model_name(model)}; log: {log}", flush=True)
    with engine_noise_to(log) as screen:
        size = window(model, s.MAX_NEW_TOKENS)
        how = replace(sampling(s), max_prompt_tokens=size - s.MAX_NEW_TOKENS)
        try:
            engine = VLLMEngine(model, size, how.seed, s.GPU_MEMORY_UTILIZATION, s.TP)
        except Exception as error:
            raise StageFailed(f"the engine did not start: {one_line(str(error), 300)}\n  log: {log}") from error
        if scoring.environment:
            limits = episode_limits(s, sampling(s))
            table = chat_episode.Table(engine, how, rows, scoring.environment, limits, size, screen, bounds(s))
            table.say(chat_episode.HELP)
            chat_episode.talk(table, typed(screen))
        else:
            screen.write(HELP + "\n")
            talk(engine, how, rows, task_system(rows), scoring, typed(screen), screen)
        engine.close()
        if distributed.is_initialized():  # else NCCL complains on the screen after the end
            distributed.destroy_process_group()
    return 0
