"""Solves one row with OpenAI's Agents SDK, beside the agent.py of a new task of turns=endpoint (docs/MULTI_TURN.md).

It runs in a Python environment of its own: `pip install openai-agents==0.24.0`.
"""

import asyncio
import json
from pathlib import Path

from agent import TOOLS, look_up, score
from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # it would be sent to OpenAI


async def solve(row: dict) -> float:
    """The score of an episode."""
    stock, schema = row["ground_truth"], TOOLS[0]["function"]

    async def called(_, arguments: str) -> str:
        return look_up(stock, json.loads(arguments))

    # The schema of the demonstrations; that of `function_tool` has other words.
    tool = FunctionTool(schema["name"], schema["description"], schema["parameters"], called, strict_json_schema=False)
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(max_retries=0))
    result = await Runner.run(Agent("shelves", tools=[tool], model=model), row["prompt"], max_turns=8)
    return score(stock, str(result.final_output))


if __name__ == "__main__":
    Path("score.json").write_text(json.dumps(asyncio.run(solve(json.loads(Path("row.json").read_text())))))
