"""`make serve`: vLLM's OpenAI-compatible server with the trained model, until Ctrl-C."""

import ipaddress
import json
import os
import shlex
import sys
import time
from pathlib import Path

from verl_tasks.evaluation.chat import task_system
from verl_tasks.evaluation.engines import window
from verl_tasks.leftovers import kept
from verl_tasks.machine.hardware import CPU_BLOCK_SIZE, cpu_dtype, refuse_taken
from verl_tasks.models.merge import base_model, is_adapter, max_rank
from verl_tasks.process import POLL_SECONDS, StageFailed, report
from verl_tasks.rows import read_rows
from verl_tasks.settings import Command, Settings, SettingsError, artifacts

KEY = "VLLM_API_KEY"  # vLLM's own variable: a key on its command line would stand in the list of processes


def check(command: Command) -> None:
    """Raise SettingsError for an address that cannot be served, or that others reach without a key."""
    if not is_loopback(command.HOST) and not os.environ.get(KEY):
        fix = f"put a key into the environment variable {KEY}, or leave HOST out"
        raise SettingsError(f"HOST={command.HOST}: others could use the server; {fix}")
    refuse_taken(command.PORT)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def names(s: Settings, model: str) -> dict[str, str]:
    """What requests call each served model, and its folder or hub id: the trained one by its task; the base model of an
    adapter, first, by its own name."""
    if not is_adapter(Path(model)):
        return {s.TASK: model}
    base = base_model(model)
    name = Path(base).name
    return {f"{name}-base" if name == s.TASK else name: base, s.TASK: model}


def arguments(s: Settings, command: Command, model: str) -> list[str]:
    """vLLM's arguments: the model, and the window, default sampling and most new tokens that `make eval` has.

    The chat template and the tokens that end an answer are in the model's folder, from which vLLM reads them.
    """
    on_cpu, served = s.STACK == "cpu", names(s, model)
    base, *adapter = served
    defaults = {"temperature": s.EVAL_TEMPERATURE, "top_p": s.TOP_P, "max_new_tokens": s.MAX_NEW_TOKENS}
    given = {
        "model": served[base],
        "served-model-name": base,
        "host": command.HOST,
        "port": command.PORT,
        "dtype": cpu_dtype() if on_cpu else "bfloat16",
        "max-model-len": window(model, s.MAX_NEW_TOKENS),
        "tensor-parallel-size": s.TP,
        "gpu-memory-utilization": s.GPU_MEMORY_UTILIZATION,
        # A model's generation_config may have others, which neither training nor evaluation uses.
        "override-generation-config": json.dumps(defaults | {"top_k": 0, "repetition_penalty": 1.0}),
    }
    given |= {"block-size": CPU_BLOCK_SIZE} if on_cpu else {}
    if adapter:  # as JSON: a folder's name may have a comma
        module = {"name": adapter[0], "path": model}
        given |= {"max-lora-rank": max_rank(Path(model)), "lora-modules": json.dumps(module, ensure_ascii=False)}
    flags = ["--enforce-eager"] * on_cpu + ["--enable-lora"] * bool(adapter)
    return [*(word for name, value in given.items() for word in (f"--{name}", str(value))), *flags]


def ready(command: Command, served: list[str], system: list[dict]) -> str:
    """What the screen says once the server answers. ``system``: the task's system message, which the client gives."""
    url, name = f"http://{_reached(command.HOST)}:{command.PORT}/v1", served[-1]
    secret = bool(os.environ.get(KEY))
    header = f'-H "Authorization: Bearer ${KEY}" ' if secret else ""
    messages = [*system, {"role": "user", "content": "Hello"}]
    body = shlex.quote(json.dumps({"model": name, "messages": messages}))
    key = f'os.environ["{KEY}"]' if secret else '"none"'
    return f"""\
ready: {url}, models: {", ".join(served)}; Ctrl-C ends it
  curl {url}/chat/completions -H "Content-Type: application/json" {header}-d {body}
  from openai import OpenAI{"; import os" * secret}
  client = OpenAI(base_url="{url}", api_key={key})
  print(client.chat.completions.create(model="{name}", messages={json.dumps(messages)}))"""


def _reached(host: str) -> str:
    """An address at which a server that listens at ``host`` is reached."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def serve(s: Settings, command: Command, model: str, own: list[str]) -> None:
    """Serve ``model`` until Ctrl-C; ``own``: more arguments of vLLM's server.

    Raises StageFailed where the server ends by itself, or does not answer within START_MINUTES.
    """
    log = artifacts() / "serve" / s.TASK / "server.log"
    test_file = s.data_dir / "test.parquet"
    system = task_system(read_rows(test_file, 1)) if test_file.is_file() else []
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments(s, command, model), *own]
    print("starting vLLM's server", flush=True)
    started, answered, late = time.monotonic(), False, False
    try:
        with kept(program, log) as launch:
            while not late and launch.keeper.poll() is None:
                if not answered and (answered := _answers(command)):
                    print(ready(command, [*names(s, model)], system), flush=True)
                late = not answered and 0 < 60 * s.START_MINUTES < time.monotonic() - started
                time.sleep(POLL_SECONDS)
            code = launch.keeper.poll()
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
        return
    if late:
        raise StageFailed(f"the server did not answer within START_MINUTES={s.START_MINUTES:g}\n  log: {log}")
    raise StageFailed(report(log, f"the server ended with exit code {code}"))


def _answers(command: Command) -> bool:
    import httpx

    try:
        return httpx.get(f"http://{_reached(command.HOST)}:{command.PORT}/health").is_success
    except httpx.HTTPError:
        return False
