"""Plays episodes of one environment for another process: a line of JSON a request, one a reply.

It runs in a Python of its own, where the environment's packages are installed; rewards/verifiers.py starts it. An
episode is the environment's own, whose model is the other process (player.py): stop conditions, tools, rewards and
cleanup are the environment's. Arguments: the environment, its settings as JSON, bytes of memory.
"""

import asyncio
import importlib
import json
import os
import resource
import sys
import threading
import traceback
from importlib.metadata import version

from player import Player

MAX_LINE = 16 * 2**20  # characters, as in rewards/verifiers.py


class Episodes:
    """The environment's ``bridge`` and its live episodes."""

    def __init__(self, bridge):
        self.bridge, self.live = bridge, {}

    async def answer(self, request: dict) -> dict:
        """What ``request`` asks for. Raises what the environment raises."""
        if "split" in request:
            rows = self.bridge.rows(request["split"], request["first"], request["count"])
            return {"rows": rows, "endless": self.bridge.endless}
        episode = request["episode"]
        if request.get("end"):
            if episode in self.live:
                self.live.pop(episode)[1].cancel()
            return {}
        if "message" in request:
            self.live[episode][0].heard.put_nowait(request["message"])
        else:
            player = Player()
            self.live[episode] = player, asyncio.ensure_future(self.bridge.play(request["row"], player))
        return await self._follows(episode)

    async def _follows(self, episode: int) -> dict:
        """What the model reads next, or the reward of an episode that has ended; ``broke``: why it has none. Raises
        what no episode can do, and ConnectionError where the environment is behind a server."""
        player, playing = self.live[episode]
        said = asyncio.ensure_future(player.said.get())
        await asyncio.wait([said, playing], return_when=asyncio.FIRST_COMPLETED)
        if said.done():
            return said.result()
        said.cancel()
        del self.live[episode]
        try:
            return {"reward": playing.result(), "done": True}
        except ConnectionError:
            raise
        except Exception as error:
            if player.refused:
                raise ValueError(player.refused) from error
            traceback.print_exc()
            return {"done": True, "broke": said_of(error)}


async def serve(bridge, replies) -> None:
    """Answer what comes by standard input, all at once; its end ends the process, whatever runs."""
    loop, tasks, episodes = asyncio.get_running_loop(), set(), Episodes(bridge)

    async def one(line: bytes) -> None:
        request = json.loads(line)
        try:
            reply = json.dumps({"n": request["n"], **await episodes.answer(request)})
            if len(reply) > MAX_LINE:
                raise ValueError(f"a reply of {len(reply)} characters, more than {MAX_LINE}")
        except Exception as error:
            reply = failed(request["n"], error)
        print(reply, file=replies, flush=True)

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lambda line=line: tasks.add(asyncio.ensure_future(one(line))))
        os._exit(0)

    async with bridge:
        print(json.dumps({"n": 0}), file=replies, flush=True)
        threading.Thread(target=read, daemon=True).start()
        await asyncio.Event().wait()


def failed(number: int, error: BaseException) -> str:
    """The reply that tells of ``error`` in one line."""
    return json.dumps({"n": number, "error": said_of(error)})


def said_of(error: BaseException) -> str:
    """``error`` in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def interface(name: str):
    """The module of this folder that plays the environment ``name``."""
    if "://" in name:
        return importlib.import_module("open_env")
    numbers = tuple(map(int, version("verifiers").split(".")[:2]))
    return importlib.import_module("v1" if numbers >= (0, 4) else "old")


def main(name: str, settings: str, memory: str) -> None:
    """Load the environment, say so, and serve it."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints must not be read as a reply
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    try:
        asyncio.run(serve(interface(name).Bridge(name, json.loads(settings)), replies))
    except BaseException as error:
        print(failed(0, error), file=replies, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
