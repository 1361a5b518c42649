"""Put the task where `make` finds it, and say what comes next."""

import os
import shlex
import shutil
import subprocess
import sys

task = {{ cookiecutter.task | jsonify }}  # fmt: skip
repo_dir = {{ cookiecutter._repo_dir | jsonify }}  # fmt: skip


def checkout_above(folder):
    """The checkout of this repository that ``folder`` lies in; None if there is none."""
    while folder != os.path.dirname(folder):
        if os.path.isfile(os.path.join(folder, "tasks/common/launch.py")):
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
    source = checkout_above(os.path.abspath(repo_dir))
    origin = subprocess.run(["git", "-C", source, "remote", "get-url", "origin"], capture_output=True, text=True)
    url = shlex.quote(origin.stdout.strip() or source)
    first = f"git clone {url} verl-tasks && mv {task} verl-tasks/tasks/ && cd verl-tasks"

print(f"wrote {os.path.relpath(home, checkout) if checkout else home}\n")
print("fill in   prepare_data.py   where the problems come from")
print("          reward.py         when a response is right (test_reward.py, examples.jsonl check it)")
print("\nnext")
for line in filter(None, [first, f"make train TASK={task}    # trains as it is"]):
    print(f"  {line}")
