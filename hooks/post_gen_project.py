"""Put the task where `make` finds it, and say what comes next."""

import os
import shlex
import shutil
import subprocess
import sys

task = {{ cookiecutter.task | jsonify }}  # fmt: skip
reward = {{ cookiecutter.reward | jsonify }}  # fmt: skip
source = {{ cookiecutter.source | jsonify }}  # fmt: skip


def checkout_above(folder):
    """The checkout of this repository that ``folder`` lies in; None if there is none."""
    while folder != os.path.dirname(folder):
        if os.path.isfile(os.path.join(folder, "tasks/common/launch/main.py")):
            return folder
        folder = os.path.dirname(folder)
    return None


here = os.getcwd()
checkout = checkout_above(os.path.dirname(here))
if checkout:
    home = os.path.join(checkout, "tasks", task)
    if here != home:
        if os.path.exists(home):
            print(f"error: {home}: exists already; take another name or remove it", file=sys.stderr)
            sys.exit(1)
        shutil.copytree(here, home)
        # cookiecutter still needs the folder that it made until it ends; what is in it has moved.
        os.chdir(os.path.dirname(here))
        shutil.rmtree(here)
    first = f"cd {checkout}" if os.path.realpath(checkout) != os.path.realpath(os.environ.get("PWD", "")) else None
else:
    home = here
    clone = checkout_above(os.readlink(f"/proc/{os.getppid()}/cwd"))  # cookiecutter is in the template's folder
    origin = subprocess.run(["git", "-C", clone, "remote", "get-url", "origin"], capture_output=True, text=True)
    url = shlex.quote(origin.stdout.strip() or clone)
    first = f"git clone {url} verl-tasks && mv {task} verl-tasks/tasks/ && cd verl-tasks"

print(f"wrote {os.path.relpath(home, checkout) if checkout else home}\n")
data = {
    "generate": "where the problems come from: generate()",
    "hub": "the data set (HUB_DATASET), its columns, and the prompt",
    "file": "the columns of your file and the prompt; put the file in place of data.jsonl, or give FILE=",
    "reasoning_gym": "the settings of the environment (CONFIG)",
}[source]
print(f"fill in   prepare_data.py   {data}")
own = {"json": ": SCHEMA", "judge": ": RUBRIC"}.get(reward, "")
if reward != "environment":
    print(f"          reward.py         when a response is right{own} (test_reward.py, examples.jsonl check it)")
judge = "export JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=name    # the model that judges: docs/JUDGE.md"
trains = "downloads the data" if source == "hub" else "trains as it is"
print("\nnext")
for line in filter(None, [first, reward == "judge" and judge, f"make train TASK={task}    # {trains}"]):
    print(f"  {line}")
