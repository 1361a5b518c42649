"""The documents: their links, the commands and files that they name, and the blocks that are marked to be run.

An HTML comment on the line before a fenced block says what a test does with the block, in the order of the document, in
a copy of the repository:

    <!-- test: run -->       its commands are run by bash; one that fails, fails the test
    <!-- test: output -->    its lines are lines of what the last block printed; `...` stands for any, times may differ
    <!-- test: file PATH --> it is written to PATH
    <!-- test: slow -->      its commands are run by the slow test, with the very small random model, after all others
"""

import ast
import importlib
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

import verl_tasks
from tests.benchmarks import pictures
from tests.helpers import (
    PYTHON,
    ROOT,
    SMALL,
    TASKS,
    checkout_with,
    copy_of_checkout,
    exported,
    outside_make,
    with_embedded,
)
from tests.results import RESULTS, linked, names, recipes
from tests.settings_page import settings_page
from verl_tasks.evaluation.plots import plt
from verl_tasks.launch.names import of_tasks
from verl_tasks.rewards.judge import Judge
from verl_tasks.settings import Command, Settings, SettingsError, load_settings
from verl_tasks.stages import STAGES, own_stages

DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "README.zh-CN", "AGENTS", "CONTRIBUTING", "CHANGELOG")),
    ROOT / "template/README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *(ROOT / "tasks" / task / "README.md" for task in TASKS),
]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FENCE = re.compile(r"(?:<!-- test: (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
MARKS = re.compile(r"run|output|slow|file \S+")
CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document, and how it is marked."""

    mark: str
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(found["mark"] or "", found["language"], found["text"]) for found in FENCE.finditer(text)]


def prose(text: str) -> str:
    """Without fenced blocks."""
    return FENCE.sub("", text)


# ---- links


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#+ +(.+?)\s*$", prose(path.read_text()), re.M):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = found.setdefault(slug, 0)
        found[slug] += 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def broken_links(path: Path, text: str) -> list[str]:
    """The links of ``text``, which stands in ``path``, that lead nowhere."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", prose(text))):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        named = names if "results/" in file else anchors
        if not target.exists() or (anchor and anchor not in named(target.resolve())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    assert broken_links(ROOT / name, (ROOT / name).read_text()) == []


def test_a_broken_link_is_found():
    text = (
        "[a](docs/NOWHERE.md) [b](README.md#no-such-heading) [c](README.md#install) `[d](x)` [e](https://example.org) "
        "[f](docs/results/recipes.json#cpu-countdown) [g](docs/results/recipes.json#none) "
        "[h](docs/results/metrics.jsonl#x)"
    )
    wrong = ["docs/NOWHERE.md", "README.md#no-such-heading", "docs/results/recipes.json#none"]
    assert broken_links(ROOT / "README.md", text) == [*wrong, "docs/results/metrics.jsonl#x"]


def test_every_document_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        links = re.findall(r"\]\(([^)\s#]+)", prose(path.read_text()))
        waiting += [(path.parent / link).resolve() for link in links if not link.startswith("http")]
    assert set(DOCUMENTS) - reached == set()


@pytest.mark.medium
def test_a_task_that_a_user_adds_breaks_no_test_of_the_house(tmp_path):
    """With a train.sh as long as a template's, no page in the README or the site, and no profile."""
    checkout = checkout_with("their_own", tmp_path, OPTIONS="turns=multi")
    modules = ("docs", "profiles", "rooms", "settings", "template", "verl_generations")
    files = [f"tests/test_{name}.py" for name in modules]
    chosen = "their_own or reached or in_its_nav or typical_use"
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    done = subprocess.run(command, cwd=checkout, env=outside_make(), capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout[-3000:]


# ---- commands of make

MAKEFILE = (ROOT / "Makefile").read_text() + (ROOT / "tasks/common/Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z_-]+):", MAKEFILE, re.M))
TARGETS |= {*STAGES} | {stage for path in ROOT.glob("tasks/*/train.sh") for stage in own_stages(path.parent)}
CALL = re.compile(r"(?:^|&&|;)\s*((?:[A-Z_]+=\S+\s+)*)make\s+([^\n]*)", re.M)


def variables() -> set[str]:
    """What a user can set: the settings, and what the Makefile and our scripts read."""
    names = {f.name for cls in (Settings, Command, Judge) for f in fields(cls)} - {"STAGE"}
    names |= of_tasks() | {"FRESH_PYTHON", "NAME"}
    names |= set(re.findall(r"\$\(([A-Z_]+)\)", MAKEFILE))
    for path in ROOT.glob("tasks/**/*"):
        if path.suffix == ".sh":
            names |= set(re.findall(r"\$\{([A-Z_]+):?[-=]", path.read_text()))
        elif path.suffix == ".py":
            names |= set(re.findall(r"environ[^\n]{0,12}\"([A-Z_]+)\"", path.read_text()))
    return names


def commands(text: str) -> list[tuple[str, list[str], list[str]]]:
    """Each command of make in blocks and inline code: as it stands, its targets, and the variables that it sets."""
    shown = [b.text for b in blocks(text) if b.language in ("", "bash", "sh")] + CODE.findall(prose(text))
    found = []
    for before, rest in (call for code in shown for call in CALL.findall(re.sub(r"\\\n\s*", "", code))):
        try:
            words = shlex.split(rest, comments=True)
        except ValueError:  # a sentence with an apostrophe
            words = rest.split()
        end = next((i for i, word in enumerate(words) if word in ("&&", "||", "|", ";")), len(words))
        words = [word.rstrip(",;:") for word in words[:end]]
        targets = [word for word in words if re.fullmatch(r"[a-z][a-z_-]*", word)]
        names = re.findall(r"([A-Z_]+)=", before) + [w.split("=")[0] for w in words if re.match(r"[A-Z_]+=", w)]
        found.append((f"make {rest}", targets, names))
    return found


def wrong_commands(text: str) -> list[str]:
    known = variables()
    return [
        shown
        for shown, targets, names in commands(text)
        if set(targets) - TARGETS or set(names) - known or (names and not targets)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_commands_name_known_targets_and_variables(name):
    assert wrong_commands((ROOT / name).read_text()) == []


def test_a_wrong_target_or_variable_is_found():
    text = "`make train TASK=x LR=1`, `cannot make this`, `make trian TASK=x`\n"
    text += "```\nA=1 make train TASK=x \\\n  LEARNING_RATE=1  # so\n```\n"
    assert wrong_commands(text) == ["make train TASK=x LEARNING_RATE=1  # so", "make trian TASK=x"]


def refused_settings(text: str) -> list[str]:
    """The commands for a task that ships whose values train.sh or the settings would refuse."""
    refused = []
    for shown, _, _ in commands(text):
        given = dict(re.findall(r"(?<!\S)([A-Z_]+)=([^\s'\"]+)", shown.split("#")[0]))
        train_sh = ROOT / "tasks" / given.get("TASK", "none") / "train.sh"
        if train_sh.exists() and not any("..." in value for value in given.values()):
            given.pop("PYTHON", None)
            try:
                load_settings(exported(train_sh, {"N_GPUS": "1", **given}))
            except (SettingsError, subprocess.CalledProcessError):
                refused.append(shown)
    return refused


@pytest.mark.parametrize("name", NAMES)
def test_commands_have_values_that_are_taken(name):
    assert refused_settings((ROOT / name).read_text()) == []


# ---- files that are named

FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"artifacts"}
# Paths may be short for those in here.
HOMES = [ROOT, ROOT / "tasks/common", ROOT / "docs", ROOT / "tests"]
PLACEHOLDER = re.compile(r"<[\w-]+>|\b[A-Z]+\b(?![\w.])")
# Of other projects, or of a task that `make new` writes.
FOREIGN = {"setup.py", "gsm8k.py", "reports/TASK/RUN/", "runs/TASK/RUN/", "agent.py", "tasks/shelves/environment.py"}


def files_named(text: str) -> list[str]:
    """What looks like a path of the repository: in inline code, and documents and scripts named anywhere."""
    found = re.findall(r"(?<![\w/])(?:docs|tasks|tests)/[\w./-]+\.(?:md|py|sh|json)\b", text)
    for code in CODE.findall(prose(text)):
        in_a_folder = re.fullmatch(r"[\w.<>*{}-]+(?:/[\w.<>*{}-]+)+/?", code) and code.split("/")[0] in folders()
        metric = code.startswith("training/") and "." not in code  # verl's, e.g. training/rollout_probs_diff_mean
        if (in_a_folder and not metric) or re.fullmatch(r"\w+\.(?:py|sh|toml)", code):
            found.append(code)
    return sorted(set(found) - FOREIGN)


def folders() -> set[str]:
    """Names with which a path of ours begins."""
    return FOLDERS | {path.name for home in HOMES for path in home.iterdir() if path.is_dir()} - {"artifacts"}


def missing_files(path: Path, text: str, own: set[str]) -> list[str]:
    """The files that ``text`` names and that are not there; ``own``: those that its commands make."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    basenames = {Path(name).name for name in tracked.splitlines()}
    missing = []
    for name in files_named(text):
        pattern = PLACEHOLDER.sub("*", name).rstrip("/")
        there = any(any(home.glob(pattern)) for home in [*HOMES, path.parent]) if "/" in name else name in basenames
        if not there and name not in own:
            missing.append(name)
    return missing


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_are_there(name):
    text = (ROOT / name).read_text()
    own = {block.mark.removeprefix("file ") for block in blocks(text) if block.mark.startswith("file ")}
    assert missing_files(ROOT / name, text, own) == []


def test_the_architecture_says_what_each_room_is_for():
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    rooms = [path.parent.name for path in ROOT.glob("tasks/common/*/__init__.py")]
    assert len(rooms) > 10 and [room for room in rooms if f"| `{room}/` |" not in text] == []


def test_a_file_that_is_not_there_is_found():
    text = "`tasks/common/nowhere.py` `stacks/*/` `tasks/<task>/reward.py` docs/NOWHERE.md `nowhere.py` `reward.py`"
    missing = missing_files(ROOT / "README.md", text + " `no/path` `a b/c`", set())
    assert missing == ["docs/NOWHERE.md", "nowhere.py", "tasks/common/nowhere.py"]


# ---- tests that are named


def named_tests(text: str) -> list[tuple[str, str]]:
    """``(file, test)`` of each `file::test_name` and `test_name` in inline code; file is empty where none is given."""
    found = [re.fullmatch(r"(?:(\S+)::)?(test_\w+)", code) for code in CODE.findall(prose(text))]
    return [(match[1] or "", match[2]) for match in found if match]


def missing_tests(text: str) -> list[str]:
    """The tests that ``text`` names and that are not there; a name alone may be in any file of tests."""
    paths = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("tasks/*/test_*.py")]
    functions = {
        str(path.relative_to(ROOT)): set(re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)) for path in paths
    }
    everywhere = set().union(*functions.values())
    named = named_tests(text)
    return [f"{file}::{name}" for file, name in named if name not in (functions.get(file, ()) if file else everywhere)]


def test_tests_that_the_rewards_name_are_there():
    text = (ROOT / "docs/REWARDS.md").read_text()
    assert len(named_tests(text)) > 15
    assert missing_tests(text) == []


# ---- messages that are explained


def unknown_messages(text: str) -> list[str]:
    """Of the tables `message | what to do` of ``text``, the messages that our code does not print; `...` stands for
    what varies."""
    paths = [
        ROOT / "Makefile",
        ROOT / "tasks/common/Makefile",
        *ROOT.glob("tasks/common/**/*.py"),
        *ROOT.glob("tasks/common/**/*.sh"),
    ]
    said = "".join(re.sub(r'"\n\s+f?"', "", path.read_text()) for path in paths)  # texts that go over two lines
    tables = re.findall(r"^\| message \| what to do \|\n\|.*\n((?:\|.*\n)+)", text, re.M)
    messages = [code for table in tables for row in table.splitlines() for code in CODE.findall(row.split(" | ")[0])]
    assert messages
    patterns = {message: ".{0,120}".join(map(re.escape, message.split("..."))) for message in messages}
    return [message for message, pattern in patterns.items() if not re.search(pattern, said)]


def test_messages_that_the_installation_explains_are_printed():
    assert unknown_messages((ROOT / "docs/INSTALLATION.md").read_text()) == []


# ---- the README, its picture and its translation


def shape(text: str) -> dict[str, list]:
    """What a translation must not change: levels of headings, code, targets of links and pictures, rows of tables,
    numbers. Links to the other README are left out."""
    plain = prose(text)
    return {
        "headings": [len(marks) for marks in re.findall(r"^(#+) ", plain, re.M)],
        "blocks": [(block.mark, block.language, block.text) for block in blocks(text)],
        "code": sorted(CODE.findall(plain)),
        "links": sorted(link for link in re.findall(r"\]\(([^)\s]+)\)", plain) if not link.startswith("README")),
        "pictures": re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", plain),
        "rows": [row.count("|") for row in re.findall(r"^\|.*$", plain, re.M)],
        "numbers": sorted(re.findall(r"\d+(?:\.\d+)?", plain)),
    }


def test_the_translation_says_the_same():
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert "(README.zh-CN.md)" in english and "(README.md)" in chinese
    assert shape(english) == shape(chinese)


def test_the_caption_of_the_readmes_picture_says_what_is_in_it():
    assert (pictures.IMAGES / "gsm8k.png").stat().st_size < 60_000
    values = pictures.curve()
    scores, entropies = values[pictures.SCORE], values[pictures.ENTROPY]
    text = " ".join((ROOT / "README.md").read_text().split())
    entropy = "rises" if entropies[-1] > entropies[0] else "falls"
    assert f"rises ({scores[0]:.2f} → {scores[-1]:.2f}), and the entropy {entropy} ({entropies[0]:.3f} → " in text
    assert f"→ {entropies[-1]:.3f} nats)" in text and f"{values['step'][-1]} GRPO steps" in text
    result = recipes()["gpu-gsm8k"]
    found = result["compare"]["metrics"]["pass@1"]
    start, end = (found[name]["value"] for name in ("base", "trained"))
    lenient = result["compare"]["metrics"]["lenient"]["difference"]
    assert f"{interval(lenient)} of it is skill" in text
    assert f"from {start:.3f} to {end:.3f}" in text and f"+{interval(found['difference'])}, paired" in text
    assert f"{result['minutes']:.0f} min in all" in text
    assert "](docs/images/gsm8k.png)" in text


def test_the_readme_shows_the_reward_and_the_files_of_countdown():
    """The imports and compute_score as they are, but for its docstring."""
    shown = next(block.text for block in blocks((ROOT / "README.md").read_text()) if block.language == "python")
    own = ast.parse((ROOT / "tasks/countdown/reward.py").read_text())
    reward = next(node for node in own.body if getattr(node, "name", "") == "compute_score")
    reward.body = reward.body[1:]
    own.body = [*(node for node in own.body if isinstance(node, ast.ImportFrom)), reward]
    assert ast.unparse(ast.parse(shown)) == ast.unparse(own)
    tree = next(b.text for b in blocks((ROOT / "README.md").read_text()) if b.text.startswith("tasks/countdown/"))
    files = [line.split()[0] for line in tree.splitlines()[1:]]
    assert files and all((ROOT / "tasks/countdown" / file).is_file() for file in files)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_pictures_are_what_their_script_draws(name, tmp_path):
    pictures.PICTURES[name](tmp_path / name)
    assert np.array_equal(plt.imread(tmp_path / name), plt.imread(pictures.IMAGES / name))


def test_the_version_is_the_same_everywhere():
    """The package's is the last release's, or after it that of the next one in the making."""
    changes, version = (ROOT / "CHANGELOG.md").read_text(), Version(verl_tasks.__version__)
    released = re.search(r"^## ([\d.]+) \(", changes, re.M)[1]
    assert f"\nversion: {released}\n" in (ROOT / "CITATION.cff").read_text()
    ahead = version.is_devrelease and version > Version(released) and "\n## Unreleased\n" in changes
    assert str(version) == released or ahead


# ---- measured results

INTERVAL = re.compile(r"-?\d+\.\d+ \[-?\d+\.\d+, -?\d+\.\d+\]")


def interval(found: dict) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def intervals(result) -> set[str]:
    """The values with intervals that a result has: those of JSON, or those on a screen."""

    def inside(found) -> set[str]:
        own = {interval(found)} if isinstance(found, dict) and {"value", "low", "high"} <= set(found) else set()
        parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        return own.union(*map(inside, parts))

    return set(INTERVAL.findall(result)) if isinstance(result, str) else inside(result)


def not_measured(text: str, folder: Path) -> list[str]:
    """The rows of ``text`` with an interval that none of the results has to which the row links."""
    wrong = []
    for row in re.findall(r"^\|.*\[.*$", text, re.M):
        links = re.findall(r"\]\(([^\s#]+\.(?:json|txt))(?:#([^\s)]*))?\)", row)
        if set(INTERVAL.findall(row)) - set().union(*(intervals(linked(folder / file, name)) for file, name in links)):
            wrong.append(row)
    return wrong


def test_results_are_those_of_their_files():
    text = (ROOT / "docs/RESULTS.md").read_text()
    assert len(INTERVAL.findall(text)) > 40
    assert not_measured(text, ROOT / "docs") == []
    # Each row of a table with files has one.
    tables = re.findall(r"^\|.*\| files \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 25 and [row for row in rows if "(results/" not in row] == []


@pytest.mark.parametrize(
    "page", [p for p in DOCUMENTS if INTERVAL.search(p.read_text())], ids=lambda path: str(path.relative_to(ROOT))
)
def test_an_interval_of_any_page_is_in_a_result(page):
    results = [linked(file, "") for file in RESULTS.iterdir() if file.suffix in (".json", ".txt")]
    assert set(INTERVAL.findall(page.read_text())) <= set().union(*map(intervals, results))


def test_a_page_or_a_program_names_each_result():
    """Metrics by step are also read all together (test_health.py)."""
    text = "".join(file.read_text() for file in [*DOCUMENTS, *(ROOT / "tests").rglob("*.py")])
    files = [*RESULTS.iterdir()]
    parts = [f"{file.name}#{name}" for file in files if f"{file.name}#" in text for name in names(file)]
    assert len(parts) > 50
    unnamed = [name for name in [*(file.name for file in files), *parts] if name not in text]
    assert [name for name in unnamed if not name.startswith("metrics.jsonl#")] == []


def test_the_lines_of_char_count_are_counted():
    folder = ROOT / "tasks/char_count"
    own, tests = (
        sum(len(re.findall(r"^\s*[^\s#]", (folder / name).read_text(), re.M)) for name in names)
        for names in (("prepare_data.py", "reward.py", "train.sh"), ("test_reward.py",))
    )
    assert (
        f"| here | {own} in `prepare_data.py`, `reward.py` and `train.sh`; {tests} in tests |"
        in (folder / "README.md").read_text()
    )


def test_seconds_and_tokens_of_a_step_are_those_of_their_files():
    rows = re.findall(r"^\|(.*)\]\(results/speed\.json#(\S+)\)", (ROOT / "docs/RESULTS.md").read_text(), re.M)
    timed = [(row, linked(RESULTS / "speed.json", name)) for row, name in rows]
    assert len(timed) > 10
    for row, found in timed:
        cells = {cell.strip() for cell in row.split("|")}
        wanted = [
            {f"{each['seconds_step']:.1f}", f"{each['tokens_per_second_per_gpu']:,.0f}"}
            for each in found["variants"].values()
        ]
        assert any(each <= cells for each in wanted), row


# ---- pages that are generated, and the file for coding agents


def test_the_site_has_every_document_in_its_nav():
    listed = set(re.findall(r"[\w./-]+\.md$", (ROOT / "docs/site/mkdocs.yml").read_text(), re.M))
    assert listed == set(NAMES)


@pytest.mark.long  # installs the site's packages into .venv-docs
def test_the_site_builds_without_a_broken_link(tmp_path):
    environment = outside_make() | {"ARTIFACTS": str(tmp_path)}
    subprocess.run(["make", "docs"], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "site/index.html").is_file() and (tmp_path / "site/docs/QUICKSTART.html").is_file()
    assert "rollout" in (tmp_path / "site/search/search_index.json").read_text()


def test_the_page_of_settings_is_what_the_generator_prints():
    assert (ROOT / "docs/SETTINGS.md").read_text() == settings_page()


def test_agents_are_told_each_file_of_a_task_and_each_kind_of_reward():
    text = (ROOT / "AGENTS.md").read_text()
    assert text.count("\n") < 120
    folder = ROOT / "template/{{cookiecutter.task}}"
    files = {re.sub(r"{%.*?%}", "", path.name) for path in folder.iterdir() if path.is_file()}
    assert {"prepare_data.py", "reward.py", "environment.py"} <= files
    assert [name for name in sorted(files - {"data.jsonl"}) if f"`{name}`" not in text] == []
    kinds = json.loads((ROOT / "template/cookiecutter.json").read_text())["reward"]
    assert [kind for kind in kinds if kind != "environment" and f"`{kind}`" not in text] == []


# ---- blocks


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_what_they_are_called(name):
    """Marks are known; Python compiles, and what it imports of ours is there; JSON is JSON, by lines or as a whole."""
    for block in blocks((ROOT / name).read_text()):
        assert not block.mark or MARKS.fullmatch(block.mark), block.mark
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                own = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("verl_tasks")
                for each in node.names if own else []:
                    module = importlib.import_module(node.module)
                    if not hasattr(module, each.name):
                        importlib.import_module(f"{node.module}.{each.name}")
        elif block.language == "json":
            for text in block.text.splitlines() if block.text.count("\n{") else [block.text]:
                json.loads(text)


def marked(name: str) -> set[str]:
    return {block.mark for block in blocks((ROOT / name).read_text())} - {""}


def steady(text: str) -> list[str]:
    """Lines whose times are the same for any machine."""
    return [re.sub(r"\d+(\.\d+)? ?s\b", "N s", line.rstrip()) for line in text.splitlines()]


def run_blocks(name: str, repository: Path, marks: tuple[str, ...], **variables: str) -> None:
    """Do in ``repository`` what the blocks of document ``name`` say that are marked `file` or with one of ``marks``."""
    with_embedded(repository / "artifacts")
    environment = outside_make() | {"PYTHON": PYTHON, "STACK": "cpu", **variables}
    printed = ""
    for block in blocks((ROOT / name).read_text()):
        kind, _, path = block.mark.partition(" ")
        if kind == "file":
            (repository / path).write_text(block.text)
        elif kind in marks and kind in ("run", "slow"):
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            result = subprocess.run(
                command, cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            printed = result.stdout
            assert result.returncode == 0, f"{block.text}\n{printed}"
        elif kind in marks and kind == "output":
            lines = steady(printed)
            wanted = [line for line in steady(block.text) if line.strip() != "..."]
            assert [line for line in wanted if line not in lines] == [], printed


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in NAMES if marked(name) & {"run", "output"}])
def test_commands_run_and_print_what_the_document_shows(name, tmp_path):
    repository = copy_of_checkout(tmp_path / "repository")
    run_blocks(name, repository, ("run", "output"))
    ruff = Path(sys.executable).parent / "ruff"
    for check in (["check"], ["format", "--diff"]):
        result = subprocess.run([ruff, *check, "--no-cache", "tasks"], cwd=repository, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if "slow" in marked(name)])
def test_slow_commands_run(name, tmp_path, small_model):
    """All commands of a document with the very small random model, as the environment says to train.sh."""
    repository = copy_of_checkout(tmp_path / "repository")
    small = {key: value for key, value in SMALL.items() if key not in ("TASK", "STACK")}
    small["MAX_TURN_LENGTH"] = small["MAX_RESPONSE_LENGTH"]
    run_blocks(name, repository, ("run", "slow"), **small, MODEL=str(small_model), STEPS="1", LIMIT="4")


MEAN_WORDS = 20  # of a sentence, on average over a page
PAGES = [name for name in NAMES if not name.startswith("README.zh")]


def text_of(document: str) -> str:
    """Without blocks of code, tables, headings, comments, and the targets of links; inline code is one word."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", document), flags=re.S)
    text = re.sub(r"^(?:\||#|!\[).*$", "", text, flags=re.M)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]+(?:\n[^`\n]+)?`", "`code`", text)


def sentences(document: str) -> list[str]:
    """The sentences of paragraphs and list items."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))", text_of(document))
    lines = [" ".join(part.split()) for part in parts]
    found = [re.split(r"(?<=[.!?])[)\]\"*]* (?=[A-Z`\"\[(*])", line) for line in lines]
    return [sentence for line in found for sentence in line if re.search(r"\w", sentence)]


def mean_words(document: str) -> float:
    """Words of a sentence on average; 0 for a page without prose."""
    counts = [len(sentence.split()) for sentence in sentences(document)]
    return sum(counts) / max(1, len(counts))


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short_on_average(name):
    assert mean_words((ROOT / name).read_text()) < MEAN_WORDS
