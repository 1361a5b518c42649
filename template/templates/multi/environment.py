"""The environment of an episode. FILL IN: the tools, and what follows a message of the model."""

from tasks.common.rewards.answers import last_answer, read_ground_truth
from tasks.common.rewards.environment import CallError, Start, Step, tool_message
from tasks.common.rewards.tool_calls import Response
from tasks.common.rows import decoded

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Number of pieces on a shelf",
            "parameters": {
                "type": "object",
                "properties": {"shelf": {"type": "integer"}},
                "required": ["shelf"],
            },
        },
    }
]


def look_up(stock: dict, arguments: dict) -> str:
    """The pieces on ``arguments["shelf"]``. Raises CallError, whose message the model reads.

    Arguments are model output, and hostile: never eval, exec or unpickle them.
    """
    shelf = arguments.get("shelf")
    if arguments.keys() != {"shelf"} or type(shelf) is not int:
        raise CallError("look_up takes one argument, shelf, a whole number")
    if shelf != stock.get("shelf"):
        raise CallError("there is nothing on this shelf")
    return str(stock["pieces"])


class Environment:
    """A message with calls gets their results; one without ends the episode: 1.0 if its <answer> is right, else 0.0."""

    def reset(self, row: dict) -> Start:
        """``row``: an RL row. The prompt, and the tools that the model may call."""
        self.stock = read_ground_truth(row["reward_model"]["ground_truth"]) or {}  # `make batch` may have none
        return Start(decoded(row["prompt"]), TOOLS)

    def step(self, action: Response) -> Step:
        """What follows ``action``, the model's message. Rewards of an episode add up; 1 in all is a success."""
        if action.calls:
            return Step([tool_message(look_up(self.stock, call["arguments"])) for call in action.calls])
        answer = last_answer(action.text)
        return Step(reward=float(answer == str(self.stock.get("pieces"))), done=True, readable=bool(answer))
