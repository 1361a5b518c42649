"""Put the task where `make` finds it, and print the next steps. {{ cookiecutter | keep_edited }}"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

task = {{ cookiecutter.task | jsonify }}  # fmt: skip
reward = {{ cookiecutter.reward | jsonify }}  # fmt: skip
source = {{ cookiecutter.source | jsonify }}  # fmt: skip
method = {{ cookiecutter.method | jsonify }}  # fmt: skip
multi = {{ cookiecutter.turns | jsonify }} == "multi"  # fmt: skip


def checkout_above(folder):
    """The checkout of this repository that contains ``folder``; None if there is none."""
    above = (folder, *folder.parents)
    return next((each for each in above if (each / "tasks/common/launch/main.py").is_file()), None)


here = Path.cwd()
checkout, first = checkout_above(here.parent), None
if checkout:
    home = checkout / "tasks" / task
    if here != home:
        if home.exists():
            sys.exit(f"error: {home}: exists already; take another name or remove it")
        shutil.copytree(here, home)
        # cookiecutter needs the working folder until it ends.
        os.chdir(here.parent)
        shutil.rmtree(here)
    if checkout.resolve() != Path(os.environ.get("PWD", "")).resolve():
        first = f"cd {checkout}"
else:
    home = here
    clone = checkout_above(Path(f"/proc/{os.getppid()}/cwd").readlink())  # cookiecutter is in the template's folder
    origin = subprocess.run(["git", "-C", clone, "remote", "get-url", "origin"], capture_output=True, text=True)
    url = shlex.quote(origin.stdout.strip() or str(clone))
    first = f"git clone {url} verl-tasks && mv {task} verl-tasks/tasks/ && cd verl-tasks"

print(f"wrote {home.relative_to(checkout) if checkout else home}\n")
data = {
    "generate": "where the problems come from: generate()",
    "hub": "the data set (HUB_DATASET), its columns, and the prompt",
    "file": "the columns of your file and the prompt; put the file in place of data.jsonl, or give FILE=",
    "reasoning_gym": "the settings of the environment (CONFIG)",
    "verifiers": "",
    "openenv": "",
}[source]
print(f"fill in   prepare_data.py   {data}" if data else "fill in   environment.py    the settings of the environment (CONFIG)")
own = {"json": ": SCHEMA", "judge": ": RUBRIC"}.get(reward, "")
if multi and source == "generate":
    print("          environment.py    the tools, and what follows a message (test_environment.py, examples.jsonl check it)")
elif reward != "environment" and not multi:
    print(f"          reward.py         when a response is right{own} (test_reward.py, examples.jsonl check it)")
judge = "export JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=name    # the model that judges: docs/JUDGE.md"
trains = {"hub": "downloads the data", "verifiers": "installs the environment", "openenv": "installs OpenEnv's client"}.get(source, "trains as it is")
train = f"make train TASK={task}    # {trains}"
if method == "distill":
    train = f"make train TASK={task} TEACHER=name    # {trains}; TEACHER: a larger model with MODEL's tokenizer"
print("\nnext")
for line in filter(None, [first, reward == "judge" and judge, train]):
    print(f"  {line}")
