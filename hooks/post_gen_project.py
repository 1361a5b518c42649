"""Put the task where `make` finds it, and print the next steps. {{ cookiecutter | keep_edited }}"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

task = {{ cookiecutter.task | jsonify }}  # fmt: skip
reward = {{ cookiecutter.reward | jsonify }}  # fmt: skip
source = {{ cookiecutter.source | jsonify }}  # fmt: skip
method = {{ cookiecutter.method | jsonify }}  # fmt: skip
turns = {{ cookiecutter.turns | jsonify }}  # fmt: skip


def say(text):
    """Print ``text``. A reader that has seen enough, as `head` has, must not undo the task that is written."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def project_above(folder):
    """The clone of the library or the project that contains ``folder``; None if there is none."""
    above = (folder, *folder.parents)
    return next((each for each in above if (each / "tasks").is_dir() and includes_ours(each / "Makefile")), None)


def includes_ours(makefile):
    return makefile.is_file() and "verl_tasks/Makefile" in makefile.read_text(errors="replace")


def pin(template):
    """What a project asks pip for: this version of the library, of its package or of its repository."""
    init = (template.parent / "__init__.py", template.parent / "tasks/common/__init__.py")
    (version,) = (re.search('__version__ = "(.+)"', each.read_text())[1] for each in init if each.is_file())

    def git(*words):
        return subprocess.run(["git", "-C", template, *words], capture_output=True, text=True).stdout.strip()

    if not (template.parent / "tasks").is_dir() or not (commit := git("rev-parse", "HEAD")):
        return f"verl-tasks=={version}"
    url = git("remote", "get-url", "origin") or str(template.parent)
    if "://" not in url:  # a folder, or host:path
        url = f"file://{url}" if url.startswith("/") else f"ssh://{url.replace(':', '/', 1)}"
    url = re.sub("^(https?://)[^/]*@", r"\1", url)  # a password or a token does not go into a file
    return f"verl-tasks @ git+{url}@{git('tag', '--points-at', 'HEAD').partition(chr(10))[0] or commit}"


def write_project(project):
    """The files of a project around its first task."""
    template = Path(f"/proc/{os.getppid()}/cwd").readlink()  # cookiecutter is in the template's folder
    replaced = {"@TASK@": task, "@PIN@": pin(template)}
    for file in sorted((template / "project").rglob("*")):
        name = file.relative_to(template / "project")
        if file.is_file() and "__pycache__" not in name.parts:
            text = file.read_text()
            for word, value in replaced.items():
                text = text.replace(word, value)
            target = project / re.sub("^git(hub|ignore)", r".git\1", str(name))  # a dot would hide it from a wheel
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                say(f"kept {target.relative_to(project)}, which is here already; the template has\n{text}")
            else:
                target.write_text(text)


def moved(home):
    """Move the task to ``home``."""
    if home.exists():
        sys.exit(f"error: {home}: exists already; take another name or remove it")
    shutil.copytree(here, home)
    # cookiecutter needs the working folder until it ends.
    os.chdir(here.parent)
    shutil.rmtree(here)


here = Path.cwd()
project, first = project_above(here.parent), None
if not project:
    # An empty folder becomes the project, or that of -o tasks; in another it is a new folder with the task's name.
    inside = here.parent.name == "tasks"
    others = [path for path in here.parent.iterdir() if path != here and path.name[0] != "."]
    project = here.parent.parent if inside else here if others else here.parent
    if project == here:
        files = list(here.iterdir())
        (here / "tasks" / task).mkdir(parents=True)
        for file in files:
            file.rename(here / "tasks" / task / file.name)
    elif not inside:
        moved(project / "tasks" / task)
    write_project(project)
elif here != project / "tasks" / task:
    moved(project / "tasks" / task)
home = project / "tasks" / task
if project.resolve() != Path(os.environ.get("PWD", "")).resolve():
    first = f"cd {shlex.quote(str(project))}"

say(f"wrote {home.relative_to(project)}\n")
data = {
    "generate": "where the problems come from: generate()",
    "hub": "the data set (HUB_DATASET), its columns, and the prompt",
    "file": "the columns of your file and the prompt; put the file in place of data.jsonl, or give FILE=",
    "reasoning_gym": "the settings of the environment (CONFIG)",
    "verifiers": "",
    "openenv": "",
}[source]
say(f"fill in   prepare_data.py   {data}" if data else "fill in   environment.py    the settings of the environment (CONFIG)")
own = {"json": ": SCHEMA", "judge": ": RUBRIC"}.get(reward, "")
if turns == "endpoint":
    say("          agent.py          the program that solves a row, and its score (test_environment.py, examples.jsonl check it)")
elif turns == "multi" and source == "generate":
    say("          environment.py    the tools, and what follows a message (test_environment.py, examples.jsonl check it)")
elif reward != "environment" and turns == "single":
    say(f"          reward.py         when a response is right{own} (test_reward.py, examples.jsonl check it)")
judge = "export JUDGE_URL=http://localhost:8000/v1 JUDGE_MODEL=name    # the model that judges: docs/JUDGE.md"
trains = {"hub": "downloads the data", "verifiers": "installs the environment", "openenv": "installs OpenEnv's client"}.get(source, "trains as it is")
train = f"make train TASK={task}    # {trains}"
if method == "distill":
    train = f"make train TASK={task} TEACHER=name    # {trains}; TEACHER: a larger model with MODEL's tokenizer"
say("\nnext")
for line in filter(None, [first, reward == "judge" and judge, train]):
    say(f"  {line}")
