"""Post-training tasks on verl: what a task imports. docs/LIBRARY.md lists it; all else in this package is internal.

A name is imported with its module when it is first asked for, so this import costs nothing. Of a module, ``__all__`` is
what a task may use.
"""

import importlib

__version__ = "0.2.0.dev0"

if __name__ != "verl_tasks":  # two names would be two copies of each module
    raise ImportError(f"{__name__}: the package is verl_tasks: `import verl_tasks`")

# Functions that most tasks need, by their modules; then whole modules.
_NAMES = {
    "rewards.answers": "last_answer read_ground_truth reward_function",
    "rewards.expression": "parse_expression",
    "rewards.examples": "check_examples",
    "evaluation.main": "evaluate",
}
_MODULES = {
    "evaluation": "stage",
    "data": "prepare records word_problems",
    "rewards": "answers environment expression gym json_answer judge math_answer program sandbox tool_calls verifiers",
}
# The module of each name that a task may import.
PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}
PUBLIC |= {name: f"{room}.{name}" for room, names in _MODULES.items() for name in names.split()}
__all__ = [*PUBLIC]


def __getattr__(name: str):
    if name not in PUBLIC:
        raise AttributeError(f"verl_tasks has no {name}: docs/LIBRARY.md lists what a task imports")
    module = importlib.import_module(f"verl_tasks.{PUBLIC[name]}")
    return module if PUBLIC[name].endswith(f".{name}") else getattr(module, name)
