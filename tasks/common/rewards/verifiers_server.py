"""Plays episodes of one environment of `verifiers` (0.2.1) for another process: a line of JSON a request, one a reply.

It runs in a Python of its own, where verifiers and the environment's package are installed; rewards/verifiers.py starts
it. An episode is verifiers' own rollout, whose model is the other process: stop conditions, tools, rubric and cleanup
are the environment's. Arguments: the environment, its settings as JSON, bytes of memory.
"""

import asyncio
import importlib
import json
import os
import resource
import sys
import threading

import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall

MAX_LINE = 16 * 2**20  # characters, as in rewards/verifiers.py


class Player(vf.Client):
    """The model of one episode: what it is asked goes to ``said``, its answers come from ``heard``."""

    # get_response takes their place.
    setup_client = to_native_tool = to_native_prompt = get_native_response = None
    raise_from_native_response = from_native_response = close = None

    def __init__(self):
        super().__init__(None)
        self.said, self.heard, self.told = asyncio.Queue(), asyncio.Queue(), []

    async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs) -> Response:
        """The model's next message; the other side is told what is new since its last one."""
        # A prompt that is a text has the role "text".
        roles = ["user" if message.role == "text" else message.role for message in prompt]
        shown = [{"role": role, "content": message.content} for role, message in zip(roles, prompt, strict=True)]
        if shown[: len(self.told)] != self.told:
            raise ValueError("the environment rewrites earlier messages, which were sampled and stay")
        new = shown[len(self.told) :]
        if any(not isinstance(message["content"], str) for message in new):
            raise ValueError("the environment shows images or sound; only text can be played")
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools or []
        ]
        self.said.put_nowait({"messages": new, "tools": [{"type": "function", "function": f} for f in functions]})
        answer = await self.heard.get()
        self.told = [*shown, {"role": "assistant", "content": answer["content"]}]
        calls = [
            ToolCall(id=f"{len(self.told)}-{number}", name=call["name"], arguments=json.dumps(call["arguments"]))
            for number, call in enumerate(answer["calls"])
        ]
        message = ResponseMessage(
            content=answer["content"],
            tool_calls=calls or None,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        return Response(id="", created=0, model=model, message=message)


class Episodes:
    """The environment and its live episodes."""

    def __init__(self, environment: vf.Environment):
        self.environment, self.live = environment, {}

    async def answer(self, request: dict) -> dict:
        """What ``request`` asks for. Raises what the environment raises."""
        if "split" in request:
            environment, first = self.environment, request["first"]
            side = environment.build_dataset() if request["split"] == "train" else environment.build_eval_dataset()
            return {"rows": [side[place] for place in range(first, min(len(side or []), first + request["count"]))]}
        episode = request["episode"]
        if request.get("end"):
            if episode in self.live:
                self.live.pop(episode)[1].cancel()
            return {}
        if "message" in request:
            self.live[episode][0].heard.put_nowait(request["message"])
        else:
            player = Player()
            row = request["row"] or self.environment.get_dataset()[0]
            playing = asyncio.ensure_future(self.environment.run_rollout(row, player, "model", {}))
            self.live[episode] = player, playing
        return await self._follows(episode)

    async def _follows(self, episode: int) -> dict:
        """What the model reads next, or the reward of an episode that has ended."""
        player, playing = self.live[episode]
        said = asyncio.ensure_future(player.said.get())
        await asyncio.wait([said, playing], return_when=asyncio.FIRST_COMPLETED)
        if said.done():
            return said.result()
        said.cancel()
        del self.live[episode]
        output = playing.result()
        if output["error"]:
            raise RuntimeError(f"{output['error']}")
        return {"reward": float(output["reward"])}


async def serve(episodes: Episodes, replies) -> None:
    """Answer what comes by standard input, all at once; its end ends the process, whatever runs."""
    loop, tasks = asyncio.get_running_loop(), set()

    async def one(line: bytes) -> None:
        request = json.loads(line)
        try:
            reply = json.dumps({"n": request["n"], **await episodes.answer(request)})
            if len(reply) > MAX_LINE:
                raise ValueError(f"a reply of {len(reply)} characters, more than {MAX_LINE}")
        except Exception as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            reply = json.dumps({"n": request["n"], "error": told[:500]})
        print(reply, file=replies, flush=True)

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lambda line=line: tasks.add(asyncio.ensure_future(one(line))))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def load(name: str, settings: dict) -> vf.Environment:
    """The environment ``name``: of a module with load_environment, or a class of a module."""
    module, _, last = name.rpartition(".")
    made = getattr(importlib.import_module(module), last, None) if module else None
    environment = made(**settings) if isinstance(made, type) else vf.load_environment(name, **settings)
    if environment.requires_group_rollouts:
        raise ValueError("its rubric scores several episodes together, which cannot be played one by one")
    return environment


def main(name: str, settings: str, memory: str) -> None:
    """Load the environment, say so, and serve it."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints must not be read as a reply
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    try:
        episodes = Episodes(load(name, json.loads(settings)))
        print(json.dumps({"n": 0}), file=replies, flush=True)
    except BaseException as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"n": 0, "error": told[:500]}), file=replies, flush=True)
        sys.exit(1)
    asyncio.run(serve(episodes, replies))


if __name__ == "__main__":
    main(*sys.argv[1:])
