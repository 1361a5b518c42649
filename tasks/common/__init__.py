"""Post-training tasks on verl: what a task imports. docs/LIBRARY.md lists it; all else in this package is internal.

A name is imported with its module when it is first asked for, so this import costs nothing.
"""

import importlib

__version__ = "0.2.0.dev0"

if __name__ != "verl_tasks":  # two names would be two copies of each module
    raise ImportError(f"{__name__}: the package is verl_tasks: `import verl_tasks`")

_NAMES = {
    "rewards.answers": "RewardError after_thinking last_answer read_ground_truth reward_function thought"
    " with_opened_thinking",
    "rewards.expression": "MAX_DIGITS calculates parse_expression",
    "rewards.json_answer": "read_object schema_problem",
    "rewards.math_answer": "compare find_answer read_number",
    "rewards.tool_calls": "Malformed Response expected_calls matched parse_response render_calls same_value",
    "rewards.environment": "CallError Start Step replayed tool_message",
    "rewards.program": "environment_of",
    "rewards.sandbox": "CallFailed Sandbox",
    "rewards.examples": "check_episodes check_examples",
    "rows": "DataError decoded posed rl_row tools_of",
    "data.formats": "conversation tool_schemas",
    "evaluation.main": "evaluate",
}
_MODULES = ("data.prepare", "data.records", "data.word_problems")
_MODULES += ("rewards.gym", "rewards.judge", "rewards.tool_calls", "rewards.verifiers")
# The module of each name that a task may import.
PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}
PUBLIC |= {module.rpartition(".")[2]: module for module in _MODULES}
__all__ = [*PUBLIC]


def __getattr__(name: str):
    if name not in PUBLIC:
        raise AttributeError(f"verl_tasks has no {name}: docs/LIBRARY.md lists what a task imports")
    module = importlib.import_module(f"verl_tasks.{PUBLIC[name]}")
    return module if PUBLIC[name].endswith(f".{name}") else getattr(module, name)
