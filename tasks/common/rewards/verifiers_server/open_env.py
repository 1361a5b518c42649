"""An environment of OpenEnv behind its server: a session for each episode, `reset` and `step` in it."""

import contextlib
import json
from itertools import count, islice

import httpx
from openenv import GenericEnvClient
from player import Player

OF_TOOLS = {"Action", "CallToolAction", "ListToolsAction"}  # titles of the actions where tools are what it has


class Bridge(contextlib.AsyncExitStack):
    """The environment at ``url``. ``settings``: ``resets``, a list of the arguments of `reset`; default: all seeds."""

    def __init__(self, url: str, settings: dict):
        super().__init__()
        self.url, self.resets = url.rstrip("/"), settings.pop("resets", None)
        if settings:
            raise ValueError(f"an environment of OpenEnv has no setting {', '.join(settings)}; there is resets")
        self.action = httpx.get(f"{self.url}/schema").raise_for_status().json()["action"]

    @property
    def endless(self) -> bool:
        """Whether the rows have no end."""
        return self.resets is None

    def rows(self, split: str, first: int, count_: int) -> list[dict]:
        """The arguments of `reset`. What the model reads first comes with the episode."""
        if split == "test":
            return []
        resets = ({"seed": seed} for seed in count()) if self.endless else self.resets
        begin = f"an episode of {self.url}, reset with "
        return [
            {"reset": reset, "prompt": [{"role": "user", "content": begin + json.dumps(reset)}]}
            for reset in islice(resets, first, first + count_)
        ]

    async def play(self, row: dict | None, player: Player) -> float:
        """The reward of the last step; the player is told those of the others. Raises RuntimeError for what the server
        says, but for an action that is none: the model reads why."""
        async with GenericEnvClient(base_url=self.url) as client:
            tools = await self._tools(client)
            result = await client.reset(**(row["reset"] if row else {}))
            shown, news = [{"role": "user", "content": _text(result.observation)}], {"reward": 0.0, "failed": 0}
            while not result.done:
                answer = await player.turn(shown, tools, **news)
                shown, news = player.told, {"reward": 0.0, "failed": 0}
                for action in self._actions(answer, tools):
                    try:
                        if not action:
                            raise ValueError("call a tool")
                        result = await client.step(action)
                        said, news["reward"] = _text(result.observation), news["reward"] + (result.reward or 0.0)
                    except (ValueError, RuntimeError) as error:
                        if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                            raise
                        said, news["failed"] = f"error: {error}", news["failed"] + 1
                    shown = [*shown, {"role": "tool" if answer["calls"] else "user", "content": said}]
                    if result.done:
                        break
            return news["reward"]

    async def _tools(self, client: GenericEnvClient) -> list[dict]:
        """OpenAI schemas: of its own tools, or of one that steps. None where the model's text is the whole action."""
        if self.action["title"] in OF_TOOLS:
            found = (await client.step({"type": "list_tools"})).observation["tools"]
            functions = [
                {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
                for tool in found
            ]
        elif len(self.action.get("required", [])) == 1:
            functions = []
        else:
            functions = [{"name": "step", "description": "Act in the environment.", "parameters": self.action}]
        return [{"type": "function", "function": function} for function in functions]

    def _actions(self, answer: dict, tools: list[dict]) -> list[dict | None]:
        """What the model's message asks for; None where it has to call a tool and does not."""
        if not tools:
            return [{self.action["required"][0]: answer["content"]}]
        if self.action["title"] not in OF_TOOLS:
            return [call["arguments"] for call in answer["calls"]] or [None]
        return [
            {"type": "call_tool", "tool_name": call["name"], "arguments": call["arguments"]} for call in answer["calls"]
        ] or [None]


def _text(observation) -> str:
    return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
