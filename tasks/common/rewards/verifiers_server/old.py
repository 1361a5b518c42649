"""Environments of verifiers before 0.4: `load_environment`, a data set, a rubric."""

import contextlib
import importlib
import json

import verifiers as vf
from player import Player
from verifiers.types import Response, ResponseMessage, ToolCall


class Model(vf.Client):
    """``player`` as a client of verifiers."""

    # get_response takes their place.
    setup_client = to_native_tool = to_native_prompt = get_native_response = None
    raise_from_native_response = from_native_response = close = None

    def __init__(self, player: Player):
        super().__init__(None)
        self.player = player

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs) -> Response:
        """The model's next message."""
        # A prompt that is a text has the role "text".
        roles = ["user" if message.role == "text" else message.role for message in prompt]
        shown = [{"role": role, "content": message.content} for role, message in zip(roles, prompt, strict=True)]
        functions = [{"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools or []]
        answer = await self.player.turn(shown, [{"type": "function", "function": each} for each in functions])
        if answer["thinking"] is not None:  # parsers of verifiers read it in the text
            answer["content"] = f"<think>\n{answer['thinking']}\n</think>\n{answer['content']}"
            self.player.told[-1]["content"] = answer["content"]
        message = ResponseMessage(
            content=answer["content"],
            tool_calls=[ToolCall(**{**call, "arguments": json.dumps(call["arguments"])}) for call in answer["calls"]]
            or None,
            finish_reason="tool_calls" if answer["calls"] else "stop",
            is_truncated=False,
        )
        return Response(id="", created=0, model=model, message=message)


class Bridge(contextlib.AsyncExitStack):
    """The environment ``name``: of a module with load_environment, or a class of a module."""

    endless = False

    def __init__(self, name: str, settings: dict):
        super().__init__()
        module, _, last = name.rpartition(".")
        made = getattr(importlib.import_module(module), last, None) if module else None
        self.environment = made(**settings) if isinstance(made, type) else vf.load_environment(name, **settings)
        if self.environment.requires_group_rollouts:
            raise ValueError("its rubric scores several episodes together, which cannot be played one by one")

    def rows(self, split: str, first: int, count: int) -> list[dict]:
        """Rows of the side ``split``, each with its ``prompt``."""
        made = self.environment
        side = made.build_dataset() if split == "train" else made.build_eval_dataset()
        return [side[place] for place in range(first, min(len(side or []), first + count))]

    async def play(self, row: dict | None, player: Player) -> float:
        """The reward of an episode: verifiers' own rollout. Raises RuntimeError for what it ended with."""
        row = row or self.environment.get_dataset()[0]
        output = await self.environment.run_rollout(row, Model(player), "model", {})
        if output["error"]:
            raise RuntimeError(f"{output['error']}")
        return float(output["reward"])
