"""Environments of verifiers 0.4 and later: a taskset, a harness, and an Env that plays them."""

import contextlib
import importlib
import json
import sys
from itertools import islice

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, omit
from player import Player
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.dialects.chat import ChatDialect, message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server as interception
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

__all__ = ["Chat"]  # verifiers finds a harness by its module
MODEL = vf.TrainClientConfig(base_url="player://")  # its answers are not streamed


class Chat(vf.Harness[vf.HarnessConfig]):
    """verifiers' `null`: the model and the task's own tools. That one starts a Python for each episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """Talk until the model calls no tool, or verifiers refuses the next turn."""
        system, prompt = self.resolve_prompt(data)
        prompt = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages = [
            message_to_wire(each) for each in [*([vf.SystemMessage(content=system)] if system else []), *prompt]
        ]
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
            )
            urls = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
            tools, places, servers = await connect_mcp(urls, stack)
            while True:
                try:
                    found = await client.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools or omit
                    )
                except APIStatusError as error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
                messages.append(found.choices[0].message.model_dump(exclude_none=True))
                if not messages[-1].get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in messages[-1]["tool_calls"]:
                    function = call["function"]
                    content = await call_mcp(servers, places, function["name"], json.loads(function["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


class Model(vf.Client):
    """The players as a client of verifiers, each found by the id of the trace that it plays."""

    def __init__(self):
        self.players: dict[str, Player] = {}

    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None) -> vf.Response:
        """The model's next message."""
        shown = [{"role": message.role, "content": _text(message.content)} for message in turn.prompt]
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in turn.tools]
        player = self.players[session_id]
        try:
            if not isinstance(dialect, ChatDialect):
                player.refuse("the agent asks for another form of answers than chat completions")
            answer = await player.turn(shown, [{"type": "function", "function": each} for each in functions])
        except ValueError as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        calls = [vf.ToolCall(**{**call, "arguments": json.dumps(call["arguments"])}) for call in answer["calls"]]
        message = vf.AssistantMessage(
            content=answer["content"], reasoning_content=answer["thinking"], tool_calls=calls or None
        )
        found = vf.Response(
            id="", created=0, model="model", message=message, finish_reason="tool_calls" if calls else "stop"
        )
        found.raw = serialize_completion(found, "model")
        return found


def _row(data: vf.TaskData) -> dict:
    """``data`` as JSON has it, without what is as its class has it; but a message is nothing without its role."""
    found = data.model_dump(mode="json", exclude_defaults=True)
    if isinstance(data.prompt, list):
        found["prompt"] = [message_to_wire(message) for message in data.prompt]
    return found


def _text(content: str | list | None):
    """The text of ``content`` where it has nothing else."""
    parts = [] if isinstance(content, str) else content or []
    if isinstance(content, str) or any(part.type != "text" for part in parts):
        return content
    return "\n".join(part.text for part in parts)


class Bridge(contextlib.AsyncExitStack):
    """``name``: a package that exports a Taskset, or a dotted module. ``settings``: verifiers' `env` block."""

    def __init__(self, name: str, settings: dict):
        super().__init__()
        if "." in name:  # verifiers looks for modules at the top
            module = importlib.import_module(name)
            name = name.replace(".", "_").lower()
            sys.modules[name] = module
        settings = {**settings, "taskset": {"id": name, **settings.get("taskset", {})}}
        for role, field in env_config_type(name, settings.get("id", "")).model_fields.items():
            if isinstance(agent := field.default, vf.AgentConfig):
                own = settings[role] = dict(settings.get(role, {}))
                if "runtime" not in agent.model_fields_set:  # verifiers' own default is a machine of its makers
                    own.setdefault("runtime", {"type": "subprocess"})
                if agent.harness is None and default_agent_harness(name).id == "bash":  # a shell on this machine
                    own.setdefault("harness", {"id": __name__})
        self.environment, self.model = load_environment(resolve_env_config(settings)), Model()
        self.tasks, self.more = [], iter(self.environment.taskset)
        known = interception.resolve_client
        interception.resolve_client = lambda config: self.model if config == MODEL else known(config)

    async def __aenter__(self):
        await self.enter_async_context(self.environment.serving())
        return self

    @property
    def endless(self) -> bool:
        """Whether the rows have no end."""
        return not self.environment.taskset.bounded

    def rows(self, split: str, first: int, count: int) -> list[dict]:
        """Rows; a taskset has no sides."""
        if split == "test":
            return []
        self.tasks += islice(self.more, max(0, first + count - len(self.tasks)))
        return [_row(task.data) for task in self.tasks[first : first + count]]

    async def play(self, row: dict | None, player: Player) -> float:
        """The reward of an episode. Raises RuntimeError for what it ended with."""
        kind = type(self.environment.taskset).task_type()
        data = kind.data_type().model_validate(row) if row else next(iter(self.environment.taskset)).data
        task = kind(data, self.environment.config.taskset.task)
        traces: list[vf.Trace] = []

        def begun(trace: vf.Trace) -> None:
            traces.append(trace)
            self.model.players[trace.id] = player

        try:
            episode = await self.environment.run_episode(task, vf.ModelContext("model", MODEL), on_trace=begun)
        finally:
            for trace in traces:
                del self.model.players[trace.id]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        return sum(trace.reward for trace in episode.traces)
