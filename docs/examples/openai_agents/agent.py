"""Solves one row with OpenAI's Agents SDK (pip install openai-agents==0.24.0): agent.py of a task of turns=endpoint."""

import asyncio
import json
from pathlib import Path

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # it would be sent to OpenAI


async def solve(row: dict) -> float:
    """The score of an episode."""
    stock, (system, question) = row["ground_truth"], row["prompt"]

    @function_tool
    def look_up(shelf: int) -> str:
        """Number of pieces on a shelf"""
        return str(stock["pieces"]) if shelf == stock["shelf"] else "error: there is nothing there"

    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(max_retries=0))
    agent = Agent("shelves", instructions=system["content"], tools=[look_up], model=model)
    result = await Runner.run(agent, question["content"], max_turns=8)
    answer = str(result.final_output).rpartition("<answer>")[2].partition("</answer>")
    return float(bool(answer[1]) and answer[0].strip() == str(stock["pieces"]))


if __name__ == "__main__":
    Path("score.json").write_text(json.dumps(asyncio.run(solve(json.loads(Path("row.json").read_text())))))
