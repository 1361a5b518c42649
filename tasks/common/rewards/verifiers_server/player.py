"""The model of one episode, as its environment sees it: each turn is asked of the process that started this one."""

import asyncio


class Player:
    """``said``: what the model is to read, for the other process. ``heard``: its messages, from there. ``refused``: why
    no episode of the environment can be played; empty where this one can."""

    def __init__(self):
        self.said, self.heard, self.told, self.refused = asyncio.Queue(), asyncio.Queue(), [], ""

    async def turn(self, shown: list[dict], tools: list[dict], **news) -> dict:
        """The model's next message: ``content``, ``thinking`` (None without), and ``calls``, each with ``name``,
        ``arguments`` and ``id``.

        ``shown``: all messages so far, each a ``role`` and a ``content``, of which the other side is told those that
        are new. ``tools``: OpenAI schemas. ``news``: what else the last step gave. Raises ValueError.
        """
        if shown[: len(self.told)] != self.told:
            self.refuse("the environment rewrites earlier messages, or several agents speak; what was sampled stays")
        new = shown[len(self.told) :]
        if any(not isinstance(message["content"], str) for message in new):
            self.refuse("the environment shows images or sound; only text can be played")
        self.said.put_nowait({"messages": new, "tools": tools, **news})
        answer = await self.heard.get()
        self.told = [*shown, {"role": "assistant", "content": answer["content"]}]
        for number, call in enumerate(answer["calls"]):
            call["id"] = f"{len(self.told)}-{number}"
        return answer

    def refuse(self, why: str) -> None:
        """Raise ValueError, and keep ``why``: the environment may swallow what is raised in it."""
        self.refused = why
        raise ValueError(why)
