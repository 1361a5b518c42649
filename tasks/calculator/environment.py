"""Arithmetic with a calculator: the model calls it, reads the results, and answers."""

from fractions import Fraction

from verl_tasks import environment, expression, last_answer, parse_expression, read_ground_truth

PLACES = 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Value of an expression",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def written(value: Fraction) -> str:
    """``value`` exactly: as a decimal where it has one of up to PLACES places, else as a fraction."""
    scaled = value * 10**PLACES
    if value.denominator == 1 or scaled.denominator > 1:
        return str(value)
    whole, part = divmod(abs(scaled.numerator), 10**PLACES)
    return f"{'-' * (value < 0)}{whole}.{part:0{PLACES}}".rstrip("0")


def calculate(arguments: dict) -> str:
    """The value of ``arguments["expression"]``, as ``written``. Raises CallError."""
    text = arguments.get("expression")
    if arguments.keys() != {"expression"} or not isinstance(text, str):
        raise environment.CallError("calculator takes one argument, expression, a text")
    found = parse_expression(text, signs_and_points=True)
    if found is None:
        raise environment.CallError(
            f"not an expression over + - * / and parentheses, with numbers of up to {expression.MAX_DIGITS} digits"
        )
    return written(found[0])


class Environment:
    """A message with calls gets their results; one without ends the episode: 1.0 if its <answer> is right, else 0.0."""

    def reset(self, row: dict) -> environment.Start:
        truth = read_ground_truth(row["reward_model"]["ground_truth"])
        self.truth = truth and str(truth["answer"])  # `make batch` may have none
        return environment.Start(environment.decoded(row["prompt"]), TOOLS)

    def step(self, action: environment.Response) -> environment.Step:
        if action.calls:
            return environment.Step([environment.tool_message(calculate(call["arguments"])) for call in action.calls])
        answer = last_answer(action.text)
        return environment.Step(reward=float(answer == self.truth), done=True, readable=bool(answer))


def wrong_forms(messages: list[str]) -> list[list[str]]:
    """What the gold check makes of the model's messages of a right episode, none of it right: the answer stands in the
    thinking, or is one of two."""
    *before, last = messages
    return [[*before, f"<think>{last}</think>"], [*before, last.replace("</answer>", " or 1</answer>")]]
