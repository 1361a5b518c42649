"""`make new`: TASK, SOURCE, ENV, CONFIG and OPTIONS as answers to the template's questions, given to cookiecutter."""

import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

from verl_tasks.places import PACKAGE, ROOT
from verl_tasks.process import errors_in_one_line
from verl_tasks.settings import SettingsError, unknown


def answers(environ: Mapping[str, str]) -> list[str]:
    """``question=answer`` for each variable that is set; OPTIONS come last and take precedence.

    Raises SettingsError for what cookiecutter would not refuse in one line, and for an answer that it would render,
    because its templates run code.
    """
    given = {"task": environ.get("TASK"), "source": environ.get("SOURCE"), "env": environ.get("ENV")}
    given["config"] = environ.get("CONFIG")
    if given["source"] == "reasoning_gym":
        given["reward"] = "environment"
    if given["source"] in ("verifiers", "openenv"):
        given["turns"] = "multi"
    replies = [f"{question}={answer}" for question, answer in given.items() if answer]
    try:
        replies += shlex.split(environ.get("OPTIONS", ""))
    except ValueError as error:
        raise SettingsError(f"OPTIONS={environ['OPTIONS'][:80]}: {str(error).lower()}") from None
    turns = next((answer for answer in replies if answer in ("turns=multi", "turns=endpoint")), "")
    if turns and (chosen := [answer for answer in replies if answer.startswith("reward=")]):
        # The template cannot tell its first choice from an answer.
        raise SettingsError(f"{chosen[0][:80]}: with {turns} the episode makes the rewards; leave reward out")
    asked = json.loads((PACKAGE / "template/cookiecutter.json").read_text())
    questions = {name: default for name, default in asked.items() if name[0] != "_"}
    for answer in replies:
        if template := re.search(r"\{[{%#]", answer):
            raise SettingsError(f"{answer[:80]}: an answer must not contain {template[0]}, which begins a template")
        name, equals, value = answer.partition("=")
        if not equals:
            raise SettingsError(f"OPTIONS={name[:80]}: has no answer; write OPTIONS={name[:80]}=answer")
        if name not in questions:
            near = unknown(name, [*map(str.upper, questions)]).lower().replace("variable", "option")
            raise SettingsError(f"OPTIONS={answer[:80]}: {near}; there are: {', '.join(questions)}")
        choices = questions[name]
        if isinstance(choices, list) and value not in choices:
            raise SettingsError(f"{answer[:80]}: must be one of {', '.join(choices)}")
        if name == "task" and os.path.exists(ROOT / "tasks" / value):
            raise SettingsError(f"tasks/{value}: exists already; take another name")
    return replies


if __name__ == "__main__":
    with errors_in_one_line(SettingsError), tempfile.TemporaryDirectory() as folder:
        command = ["-o", "tasks", "--no-input", "--", str(PACKAGE / "template"), *answers(os.environ)]
        config = Path(folder, "config.yaml")  # else it reads and writes in the home folder, which may not be there
        config.write_text(json.dumps({"cookiecutters_dir": folder, "replay_dir": folder}))
        import cookiecutter.cli

        cookiecutter.cli.main(["--config-file", str(config), *command], prog_name="cookiecutter")
