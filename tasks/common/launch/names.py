"""Refuse unknown variables on make's command line: `python3 -m verl_tasks.launch.names GOALS -- NAMES`.

Prints one line with the reason, or nothing. Runs before the installation, so it uses only Python's own library.
"""

import ast
import json
import re
import sys

from verl_tasks.places import PACKAGE
from verl_tasks.settings import ROOT, Command, Settings, unknown

# Variables of the Makefile itself, and of other tools.
MAKES = {"ARGS", "ARTIFACTS", "BASE_PYTHON", "BFCL_PROJECT_ROOT", "CONFIG", "CUDA_VISIBLE_DEVICES", "ENV", "HOME"}
MAKES |= {"EVAL_MULTIPROCESSING", "FLASH_ATTN_WHEEL", "FRESH_PYTHON", "NAME", "NETRC", "OPTIONS", "PATH"}
MAKES |= {"PYTHON", "SHARED_DATA", "SLOW", "TMPDIR", "TORCH_INDEX", "UPGRADE", "YES"}
PREFIXES = ("RAY_", "HF_", "VLLM_", "VERL_", "NCCL_", "TORCH_", "CUDA_", "OMP_", "PIP_", "UV_", "WANDB_", "TRACKIO_")
PREFIXES += ("MLFLOW_", "SWANLAB_", "PYTEST_", "PYTHON", "TOKENIZERS_", "TRANSFORMERS_", "SSL_", "GLOO_")
OF_NEW = {"TASK", "SOURCE", "ENV", "CONFIG", "OPTIONS", "PYTHON", "STACK"}


def of_the_judge() -> set[str]:
    """Variables of the judge, read from its source: the packages that it imports may not be installed yet."""
    return set(re.findall(r"\bJUDGE_[A-Z_]+", (PACKAGE / "rewards/judge.py").read_text()))


def of_tasks() -> set[str]:
    """Variables of the tasks' own stages: the fields of a class Variables in tasks/*/*.py."""
    names = set()
    for path in ROOT.glob("tasks/*/*.py"):
        if "class Variables" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == "Variables":
                names |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    return names


def refusal(goals: list[str], names: list[str]) -> str:
    """One line about the first unknown one of ``names``; empty if all are known."""
    if "new" in goals:
        answers = [name for name in json.loads((PACKAGE / "template/cookiecutter.json").read_text()) if name[0] != "_"]
        for name in sorted(set(names) - OF_NEW):
            if name.lower() in answers:
                return f'{name}: make new takes it as OPTIONS="{name.lower()}=..."'
            return f"{name}: make new has no such variable; there are: {', '.join(sorted(OF_NEW))}"
        return ""
    known = {*Settings.__dataclass_fields__, *Command.__dataclass_fields__, *MAKES}
    for name in sorted(names):
        if name in known or name.startswith(PREFIXES) or name in (known := known | of_tasks() | of_the_judge()):
            continue
        lost = "ARGS" in names and ("." in name or name.startswith("+"))
        return f"{name}: " + ('put all of ARGS in quotes: ARGS="a=1 b=2"' if lost else unknown(name, known))
    return ""


if __name__ == "__main__":
    words = sys.argv[1:]
    middle = words.index("--")
    print(refusal(words[:middle], words[middle + 1 :]))
