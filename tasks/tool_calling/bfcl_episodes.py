"""BFCL's multi-turn questions as episodes: calls run in the package's simulated APIs, its checker gives the reward."""

import json

from verl_tasks import environment, sandbox, tool_calls

MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
MOST_STEPS = 20  # MAXIMUM_STEP_LIMIT of the package: messages with calls in a turn of the user
CALL_SECONDS = 5.0  # of all calls up to a step; the package's own answers take some ms
STEP_SECONDS = 3600.0  # the sandbox bounds a step; this has its wait for those of other episodes too
APIS = sandbox.Sandbox("tasks.tool_calling.bfcl_apis:worker", seconds=CALL_SECONDS)


def episode_row(bfcl, category: str, index: int, entry: dict, answer: list[list[str]]) -> dict:
    """The RL row of an ``entry`` of the package ``bfcl`` and the ``answer`` to it, the calls of each of the user's
    turns. Its ground truth has what bfcl_apis.py reads, and the user's ``later`` turns, lists of messages."""

    def tools(functions: list[dict]) -> list[dict]:
        return bfcl.convert_to_tool(functions, bfcl.GORILLA_TO_OPENAPI, bfcl.ModelStyle.OPENAI_COMPLETIONS)

    first, *later = entry["question"]
    for turn, functions in entry.get("missed_function", {}).items():
        text = json.dumps(tools(functions))
        content = bfcl.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=text)
        later[int(turn) - 1] = [{"role": "user", "content": content}]
    question = {name: entry[name] for name in ("involved_classes", "initial_config")}
    question |= {"category": category, "long_context": "long_context" in category, "answer": answer, "later": later}
    return environment.rl_row(category, first, question, "test", index, tools(entry["function"]))


class Environment:
    """As the package's inference_multi_turn_FC: a message with calls gets their results, one without, or with
    malformed ones, the user's next turn. The last turn's end has the reward, 1.0 if the checker accepts, else 0.0; more
    than MOST_STEPS messages with calls in a turn end the episode, and so do calls beyond the sandbox's limits."""

    def reset(self, row: dict) -> environment.Start:
        self.question = json.loads(row["reward_model"]["ground_truth"])
        self.turns: list[list[list[dict]]] = [[]]  # of each turn of the user the steps, of each step its calls
        return environment.Start(environment.decoded(row["prompt"]), environment.tools_of(row))

    def step_text(self, text: str) -> environment.Step:
        """In place of ``step``: the package goes on after malformed calls and carries out those of unknown tools."""
        try:
            calls = tool_calls.parse_response(text).calls
        except tool_calls.Malformed:
            return self._next_turn(failed=1)
        if not calls:
            return self._next_turn(failed=0)
        self.turns[-1].append(calls)
        if len(self.turns[-1]) > MOST_STEPS:
            return environment.Step(done=True)
        try:
            results = APIS.call("results", self.question, [step for turn in self.turns for step in turn])
        except sandbox.CallFailed:
            return environment.Step(done=True, failed=1)
        failed = sum(result.startswith("Error during execution:") for result in results)
        return environment.Step(list(map(environment.tool_message, results)), failed=failed)

    def _next_turn(self, failed: int) -> environment.Step:
        if later := self.question["later"][len(self.turns) - 1 :]:
            self.turns.append([])
            return environment.Step(later[0], failed=failed)
        try:
            right = APIS.call("verdict", self.question, self.turns) == ""
        except sandbox.CallFailed:
            right = False
        return environment.Step(reward=float(right), done=True, failed=failed)
