"""BFCL's simulated APIs and its checker of multi-turn answers, for the worker of a sandbox (rewards/sandbox.py).

The package carries out a call by eval() on its text. Here a call is a name and JSON values: only a public method of the
APIs is called, with these values. The checker is the package's, with this in place of its eval().
"""

import ast
import copy
import importlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable

PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval"
MAX_RESULT = 60_000  # characters of all results of a step; the sandbox answers in 64 KiB


class Apis:
    """New instances of the APIs of a question: ``{"involved_classes", "initial_config", "long_context"}``."""

    def __init__(self, question: dict):
        backends = importlib.import_module("bfcl_eval.constants.executable_backend_config")
        self.instances, self.methods = {}, {}
        for name in question["involved_classes"]:
            made = getattr(importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in backends.STATELESS_CLASSES:
                state = copy.deepcopy(question["initial_config"].get(name, {}))
                made._load_scenario(state, long_context=question["long_context"])
            self.instances[name] = made
            found = inspect.getmembers(made, predicate=inspect.ismethod)
            self.methods |= {method: bound for method, bound in found if not method.startswith("_")}

    def results(self, calls: list[dict]) -> list[str]:
        """What each of ``calls`` ``{"name", "arguments"}`` returns, as text, in the package's words. ``positional``
        arguments are those of the package's own answers."""
        return [self._result(call) for call in calls]

    def _result(self, call: dict) -> str:
        method = self.methods.get(call["name"])
        if method is None:
            return f"Error during execution: name '{call['name']}' is not defined"
        try:
            result = method(*call.get("positional", ()), **call["arguments"])
            if isinstance(result, dict):
                try:
                    return json.dumps(result)
                except (TypeError, ValueError):  # some return an object
                    return str(result)
            return str(result)
        except Exception as error:
            return f"Error during execution: {error}"


def literal_call(text: str) -> dict:
    """The call that one of the package's own answers, Python text, stands for; its values are literals."""
    call = ast.parse(text, mode="eval").body
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    return {"name": call.func.id, "positional": [ast.literal_eval(each) for each in call.args], "arguments": arguments}


def results(question: dict, steps: list[list[dict]]) -> list[str]:
    """The results of the last of ``steps``, each a list of calls, played from the question's start."""
    apis = Apis(question)
    found = [apis.results(step) for step in steps][-1]
    while sum(map(len, found)) > MAX_RESULT:
        longest = max(range(len(found)), key=lambda index: len(found[index]))
        found[longest] = found[longest][: len(found[longest]) // 2]
    return found


def verdict(question: dict, turns: list[list[list[dict]]]) -> str:
    """Why the checker refuses ``turns``, the steps of each of the user's turns; empty where it accepts them."""
    checker = importlib.import_module(f"{PACKAGE}.multi_turn_checker")
    apis: dict[str, Apis] = {}

    def execute(func_call_list, model_name, **_):
        """In place of the package's execute_multi_turn_func_call; ``model_name`` tells its own answers apart."""
        played = apis.setdefault(model_name, Apis(question))
        calls = [literal_call(call) if isinstance(call, str) else call for call in func_call_list]
        return played.results(calls), played.instances

    checker.execute_multi_turn_func_call = execute
    entry = {**question, "id": f"{question['category']}_0"}
    found = checker.multi_turn_checker(turns, question["answer"], entry, question["category"], "model")
    return "" if found["valid"] else found["error_type"]


def worker() -> Callable:
    """What a sandbox calls: ``results`` or ``verdict`` by name, with their arguments."""
    # On import the package makes folders for results and locks, by default in site-packages.
    os.environ["BFCL_PROJECT_ROOT"] = tempfile.gettempdir()
    importlib.import_module(f"{PACKAGE}.multi_turn_checker")
    backends = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    for name in ("GorillaFileSystem", "MathAPI", "MessageAPI", "TicketAPI", "TradingBot", "TravelAPI", "TwitterAPI"):
        importlib.import_module(backends.CLASS_FILE_PATH_MAPPING[name])
    importlib.import_module(backends.CLASS_FILE_PATH_MAPPING["VehicleControlAPI"])
    functions = {"results": results, "verdict": verdict}
    return lambda name, *arguments: functions[name](*arguments)
