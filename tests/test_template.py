"""The template: every way in, every combination of answers, bad names."""

import ast
import functools
import importlib
import importlib.util
import itertools
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cookiecutter import main
from jinja2 import Environment

import tasks
from tests.helpers import (
    MAKE,
    ROOT,
    TASKS,
    cookiecutter,
    copy_of_checkout,
    exported,
    make,
    outside_make,
    stacks,
    task_settings,
)
from verl_tasks.data import prepare
from verl_tasks.launch import memory_checks
from verl_tasks.machine import hardware, memory
from verl_tasks.models.find import resolve_model
from verl_tasks.rewards import judge
from verl_tasks.rewards.environment import replayed
from verl_tasks.rows import DataError, decoded, read_rows, tools_of, validate_parquet
from verl_tasks.settings import METHODS, load_settings
from verl_tasks.stacks import cpu
from verl_tasks.training import verl_config

QUESTIONS = json.loads((ROOT / "template/cookiecutter.json").read_text())
CHOICES = {name: values for name, values in QUESTIONS.items() if isinstance(values, list) and name[0] != "_"}
PAIRS = [{"reward": reward, "source": source} for reward in CHOICES["reward"] for source in CHOICES["source"]]
OTHERS = [name for name in CHOICES if name not in ("turns", "reward", "source")]
OTHER_CHOICES = [dict(zip(OTHERS, values, strict=True)) for values in itertools.product(*map(CHOICES.get, OTHERS))]
MADE = [task for task in TASKS if (ROOT / "tasks" / task / "answers.json").exists()]
STACKS = stacks()
FILES = {"README.md", "answers.json", "evaluate.py", "examples.jsonl", "prepare_data.py", "train.sh"}
FILES |= {"reward.py", "test_reward.py"}
OF_EPISODES = FILES - {"reward.py", "test_reward.py"} | {"environment.py", "test_environment.py"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A git clone of the working tree, as a user has it."""
    source, clone = tmp_path_factory.mktemp("source") / "tasks.git", tmp_path_factory.mktemp("clone") / "verl tasks"
    copy_of_checkout(source)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], cwd=source, check=True)
    subprocess.run(["git", "clone", "-q", source, clone], check=True)
    return clone


def tree(folder: Path) -> set[str]:
    hidden = (".git", "__pycache__")
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not set(hidden) & set(path.parts)}


def git_url(checkout: Path) -> str:
    return f"git+file://{checkout}"


def ways_in(checkout: Path) -> dict[str, list[str]]:
    return {
        "cookiecutter .": ["."],
        "cookiecutter template -o tasks": ["template", "-o", "tasks"],
        "cookiecutter GIT_URL": [git_url(checkout)],
        "cookiecutter GIT_URL -o tasks": [git_url(checkout), "-o", "tasks"],
        "cookiecutter GIT_URL --directory template": [git_url(checkout), "--directory", "template"],
    }


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """cookiecutter keeps clones and replays in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.medium
@pytest.mark.parametrize("way", ways_in(Path()))
def test_every_way_in_scaffolds_under_tasks(way, checkout, own_home):
    result = cookiecutter(*ways_in(checkout)[way], "--no-input", "task=fresh", cwd=checkout)
    home = checkout / "tasks/fresh"
    try:
        assert result.returncode == 0, result.stdout
        assert tree(home) == FILES
        assert "make train TASK=fresh" in result.stdout
        assert not (checkout / "fresh").exists()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_a_new_task_of_distillation_asks_for_a_teacher(checkout, own_home):
    result = cookiecutter("template", "-o", "tasks", "--no-input", "task=taught", "method=distill", cwd=checkout)
    home = checkout / "tasks/taught"
    try:
        assert "make train TASK=taught TEACHER=name " in result.stdout
        commands = re.findall("^make train .*", (home / "README.md").read_text(), re.M)
        assert commands and all(" TEACHER=name " in command for command in commands)
    finally:
        shutil.rmtree(home)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("name", "way"), zip(["a/b", "../evil", "{{7*7}}", "naïve", "a b"], ways_in(Path()), strict=True)
)
def test_bad_name_gets_one_line_and_leaves_nothing(way, name, checkout, own_home):
    before = tree(checkout.parent)
    result = cookiecutter(*ways_in(checkout)[way], "--no-input", f"task={name}", cwd=checkout)
    assert result.returncode != 0
    assert len(result.stdout.splitlines()) == 1 and result.stdout.startswith("error: task ")
    assert tree(checkout.parent) == before


def test_an_existing_task_is_kept(checkout, own_home):
    before = (checkout / "tasks/countdown/reward.py").read_bytes()
    for way in ("cookiecutter .", "cookiecutter template -o tasks"):
        result = cookiecutter(*ways_in(checkout)[way], "--no-input", "task=countdown", cwd=checkout)
        assert result.returncode != 0
        assert "countdown" in result.stdout
    assert (checkout / "tasks/countdown/reward.py").read_bytes() == before
    assert not (checkout / "countdown").exists()


@pytest.mark.parametrize("template", [".", "{checkout}/template"])
def test_a_task_can_be_written_outside_of_the_checkout_from_inside(template, checkout, own_home, tmp_path):
    arguments = [template.format(checkout=checkout), "-o", tmp_path, "--no-input", "task=far"]
    result = cookiecutter(*arguments, cwd=checkout)
    assert result.returncode == 0 and "Traceback" not in result.stdout, result.stdout
    assert tree(tmp_path / "tasks/far") == FILES and not (checkout / "tasks/far").exists()
    assert (tmp_path / "Makefile").is_file() and f"cd {tmp_path}" in result.stdout


def test_a_new_task_needs_no_home_folder(checkout, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    result = make("new", TASK="homeless", cwd=checkout)
    try:
        assert result.returncode == 0 and tree(checkout / "tasks/homeless") == FILES, result.stdout
    finally:
        shutil.rmtree(checkout / "tasks/homeless", ignore_errors=True)


def test_a_reader_that_has_seen_enough_does_not_undo_the_new_task(checkout):
    piped = ["bash", "-o", "pipefail", "-c", f"{' '.join(MAKE)} new TASK=piped | head -n 0"]
    done = subprocess.run(piped, cwd=checkout, env=outside_make(), capture_output=True, text=True)
    try:
        assert (done.returncode, done.stderr) == (0, "") and tree(checkout / "tasks/piped") == FILES
    finally:
        shutil.rmtree(checkout / "tasks/piped", ignore_errors=True)


def test_a_projects_pin_has_no_password_of_the_clones_remote(own_home, tmp_path):
    clone = copy_of_checkout(tmp_path / "clone")
    remote = ["remote", "add", "origin", "https://me:secret@example.org/a/verl-tasks.git"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"], ["tag", "v1"], remote):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *command], cwd=clone, check=True)
    (tmp_path / "project").mkdir()
    assert cookiecutter(str(clone), "--no-input", "task=own", cwd=tmp_path / "project").returncode == 0
    written = (tmp_path / "project/pyproject.toml").read_text()
    assert '"verl-tasks @ git+https://example.org/a/verl-tasks.git@v1"' in written


# ---- every combination of choices: rendered once, then linted, tested, composed, and run


def accepted(answers: dict[str, str]) -> bool:
    """Whether template/local_extensions.py takes this reward with this source."""
    if answers["source"] == "reasoning_gym":
        return answers["reward"] in ("environment", "math", "exact", "judge")
    if answers["source"] in ("verifiers", "openenv"):  # tests/test_verifiers.py
        return False
    return answers["reward"] != "environment"


REFUSED = [pair for pair in PAIRS if not accepted(pair) and pair["source"] not in ("verifiers", "openenv")]
# The method and LoRA are a line of train.sh each: they take turns over the rewards and sources.
ACCEPTED = [pair | other for pair, other in zip(filter(accepted, PAIRS), itertools.cycle(OTHER_CHOICES), strict=False)]
# A multi-turn task, under two names: nothing but the method and LoRA can be chosen.
MULTI = {"turns": "multi", "reward": "math", "source": "generate"}
ACCEPTED += [MULTI | {"method": "gspo", "lora": "yes"}, MULTI | {"method": "dapo", "lora": "no"}]
ACCEPTED += [MULTI | {"turns": "endpoint", "method": "grpo", "lora": "no"}]
# Short and long names, before and after `common` in the order of imports; a long name makes long lines.
NAMES = {f"{'az'[i % 2]}{i}".ljust(40 if i % 3 == 0 else 0, "x"): answers for i, answers in enumerate(ACCEPTED)}
ABOUT = {name: "-".join(answers.values()) for name, answers in NAMES.items()}


def covering(names: dict[str, dict[str, str]]) -> list[str]:
    """Names in whose answers each choice of each question is seen at least once."""
    seen, chosen = set(), []
    for name, answers in names.items():
        if new := set(answers.items()) - seen:
            seen |= new
            chosen.append(name)
    return chosen


# Options that are free text, each tried in one of the combinations.
FREE = [
    {"model": "embedded", "gpus": "8", "description": "d" * 120},
    {"model": "/data/some.folder/with-a-long-name/of-a-model", "gpus": "1"},
]
CONFIGS = [
    {"env": "chain_sum", "config": '{"min_terms": 2, "max_terms": 3, "allow_negation": false}'},
    {
        "env": "basic_arithmetic",
        "config": '{"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2, "operators": ["+", "-"], '
        '"allow_parentheses": false, "whitespace": "single"}',
    },
    {},
]


def options(index: int, answers: dict[str, str]) -> dict[str, str]:
    """All answers of a combination: its choices, and some free text."""
    others = FREE[index] if index < len(FREE) else {}
    own = CONFIGS[index % 3] if answers.get("source") == "reasoning_gym" and "env" not in answers else {}
    return {**answers, **others, **own}


def render_tasks(checkout: Path, home: Path, names: dict[str, dict[str, str]], first: int = 0) -> dict[str, Path]:
    """The folder of each task of ``names``, with the free text of its place from ``first`` on; cookiecutter keeps what
    it keeps in ``home``."""
    config = home / "config.yaml"
    config.write_text(f"cookiecutters_dir: {home}\nreplay_dir: {home}\n")
    folders = {}
    for index, (name, answers) in enumerate(names.items(), first):
        folder = main.cookiecutter(
            str(checkout / "template"),
            no_input=True,
            extra_context={"task": name, **options(index, answers)},
            output_dir=str(checkout / "tasks"),
            config_file=str(config),
        )
        folders[name] = Path(folder)
    return folders


def check_tasks(checkout: Path, homes: list[Path]) -> dict[str, subprocess.CompletedProcess]:
    """Each linter, and the tasks' own tests, once over all of ``homes``."""
    tools = Path(sys.executable).parent
    commands = {
        "ruff check": [tools / "ruff", "check", "--no-cache", *homes],
        "ruff format": [tools / "ruff", "format", "--no-cache", "--diff", *homes],
        "shellcheck": [tools / "shellcheck", "-x", *(home / "train.sh" for home in homes)],
        "pytest": [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *homes],
    }
    run = {"cwd": checkout, "env": environment(checkout), "capture_output": True, "text": True}
    return {name: subprocess.run(command, **run) for name, command in commands.items()}


@pytest.fixture(scope="module")
def rendered(checkout, tmp_path_factory) -> dict[str, Path]:
    """The folder of each name in NAMES."""
    return render_tasks(checkout, tmp_path_factory.mktemp("home"), NAMES)


@pytest.fixture(scope="module")
def checked(rendered, checkout) -> dict[str, subprocess.CompletedProcess]:
    return check_tasks(checkout, list(rendered.values()))


@pytest.mark.long
def test_the_whole_product_of_answers_lints_composes_and_passes_its_own_tests(tmp_path):
    checkout = copy_of_checkout(tmp_path / "checkout")
    product = [pair | other for pair in filter(accepted, PAIRS) for other in OTHER_CHOICES]
    assert len(product) > 200
    names = {f"t{i}": answers for i, answers in enumerate(product)}
    homes = render_tasks(checkout, tmp_path, names)
    for done in check_tasks(checkout, list(homes.values())).values():
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    once = {}  # a second each: one for each stack, method and LoRA
    for index, (name, answers) in enumerate(names.items()):
        once.setdefault((STACKS[index % len(STACKS)], answers["method"], answers["lora"]), name)
    for (stack, *_), name in once.items():
        check_composition(settings_of(homes[name], STACK=stack), names[name])


@pytest.mark.medium
@pytest.mark.parametrize("tool", ["ruff check", "ruff format", "shellcheck", "pytest"])
def test_every_combination_lints_and_passes_its_own_tests(tool, checked):
    done = checked[tool]
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


@pytest.mark.parametrize("name", NAMES, ids=ABOUT.get)
def test_every_combination_renders_to_a_few_plain_files(name, rendered):
    home, answers = rendered[name], NAMES[name]
    files = OF_EPISODES if "turns" in answers else FILES
    more = {"data.jsonl"} if answers["source"] == "file" else set()
    more |= {"agent.py"} if answers.get("turns") == "endpoint" else set()
    assert tree(home) == files | more
    for file in tree(home):
        assert not re.search(r"\{\{[^}]|\{%|cookiecutter\.", (home / file).read_text()), f"{file} has stray Jinja"
    assert json.loads((home / "answers.json").read_text())["cookiecutter"].items() >= answers.items()


def test_a_task_that_nobody_described_says_what_its_own_problems_are(rendered):
    """One line for each kind of problem, and another for each other kind."""
    said = {}
    for name, answers in list(NAMES.items())[len(FREE) :]:
        line = (rendered[name] / "README.md").read_text().splitlines()[2]
        kind = answers["source"] if answers["source"] in ("hub", "reasoning_gym") else answers["reward"]
        said.setdefault((kind, answers.get("turns") is None), set()).add(line)
    assert said.pop(("reasoning_gym", True)) == {"chain_sum of reasoning-gym.", "basic_arithmetic of reasoning-gym."}
    lines = [line for found in said.values() for line in found]
    assert len(lines) == len(said) == len(set(lines)) == 9, said
    assert said[("json", True)] == {"Read name, age and city from a sentence."}


def settings_of(home: Path, **changes: str):
    return load_settings(exported(home / "train.sh", {"N_GPUS": "1", **changes}))


def check_composition(s, answers: dict[str, str]) -> None:
    """The settings ``s`` of a task are those of its ``answers``, and verl's config takes them."""
    assert (answers["method"], answers["source"]) == (s.METHOD, s.SOURCE), answers
    assert bool(s.LORA_RANK) == (answers["lora"] == "yes"), answers
    if s.METHOD != "dpo":
        rl = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "some/model", Path("/r")))
        assert rl.actor_rollout_ref.model.lora_rank == s.LORA_RANK, answers
    overrides = verl_config.sft_overrides(s, "some/model", Path("/r"), Path("/sft.parquet"))
    sft = verl_config.compose("sft_trainer_engine", overrides)
    assert sft.model.lora_rank == s.LORA_RANK, answers


# All combinations: the long test above. A choice reaches verl's config in the same way whatever the other choices are.
@pytest.mark.parametrize("name", covering(NAMES), ids=ABOUT.get)
def test_every_choice_composes_against_verls_config(name, rendered):
    stack = STACKS[list(NAMES).index(name) % len(STACKS)]
    check_composition(settings_of(rendered[name], STACK=stack), NAMES[name])


def module_of(home: Path, file: str):
    """A module of a rendered task, beside the tasks of this working tree, whose verl_tasks it takes."""
    if str(home.parent) not in tasks.__path__:
        tasks.__path__.append(str(home.parent))
    return importlib.import_module(f"tasks.{home.name}.{file}")


def made_of(rendered: dict[str, Path], reward: str, source: str = "file") -> Path:
    """The folder of a task with that reward and source."""
    chosen = {"reward": reward, "source": source}.items()
    return next(rendered[name] for name in NAMES if NAMES[name].items() >= chosen)


def judged(question, response, reference="", rubric="") -> dict[str, float]:
    """In place of the model that judges."""
    return {"score": float(response != ""), "acc": float(response != ""), "format": float(response != "")}


def local_copy_of_hub(home: Path, folder: Path) -> Path:
    """A folder of the form of the task's hub data set: its sample rows, under the names of its columns."""
    reward = json.loads((home / "answers.json").read_text())["cookiecutter"]["reward"]
    rows = part_of(reward, "data").splitlines()
    columns = getattr(module_of(home, "prepare_data"), "COLUMNS", None)
    folder.mkdir()
    for split, part in (("test", rows[::4]), ("train", [row for i, row in enumerate(rows) if i % 4])):
        with (folder / f"{split}.jsonl").open("w") as file:
            for row in map(json.loads, part):
                if columns:
                    row = {columns["prompt"]: row.pop("question"), columns["answer"]: row.pop("answer"), **row}
                file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return prepare.load_tokenizer("embedded")


@pytest.mark.medium
@pytest.mark.parametrize("name", NAMES, ids=ABOUT.get)
def test_every_combination_makes_data_whose_demonstrations_are_right(name, rendered, tokenizer, monkeypatch, tmp_path):
    home = rendered[name]
    changes = {"MODEL": resolve_model("embedded"), "TRAIN_SIZE": "64", "TEST_SIZE": "16", "SFT_SIZE": "32"}
    changes["DEV_SIZE"] = "8"
    if NAMES[name]["source"] == "hub":
        changes["SOURCE"] = str(local_copy_of_hub(home, tmp_path / "hub"))
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    monkeypatch.setattr(judge, "score", judged)
    monkeypatch.setattr(prepare, "load_tokenizer", lambda model, **_: tokenizer)  # the same one 25 times
    if "turns" in NAMES[name]:  # a task is multi-turn by its files
        monkeypatch.setattr("verl_tasks.settings.ROOT", home.parents[1])
        for part in ("agent", "environment"):
            if (home / f"{part}.py").is_file():
                module_of(home, part)  # so that prepare_data.py finds it
    s = settings_of(home, **changes)
    sources = {}
    monkeypatch.setattr(prepare, "main", sources.update)
    runpy.run_path(str(home / "prepare_data.py"), run_name="__main__")
    manifest = prepare.prepare(s, sources)
    assert manifest["rows"] == {"test": 16, "dev": 8, "train": 64, "sft": 32}
    for part in ("train", "dev", "test"):
        assert validate_parquet(s.data_dir / f"{part}.parquet", "rl") == manifest["rows"][part]
    assert validate_parquet(s.data_dir / "sft.parquet", "sft") == 32
    own = {json.dumps(row["prompt"]): row for row in rows_of(s, "train")}
    for row in rows_of(s, "sft"):
        first = row.get("prompt_messages") or len(row["messages"]) - 1
        rl, answers = own[json.dumps(row["messages"][:first])], [m["content"] for m in row["messages"][first:]]
        if s.multi_turn:
            made = module_of(home, "environment").Environment
            assert replayed(made, rl, [answers[0], answers[2]]) == (1.0, 0, True)
        else:
            compute_score = module_of(home, "reward").compute_score
            assert compute_score(s.TASK, answers[0], rl["reward_model"]["ground_truth"])["score"] == 1.0
        assert len(tokenizer("".join(answers))["input_ids"]) < s.MAX_RESPONSE_LENGTH
    for row in rows_of(s, "train"):
        assert not prepare.too_long(tokenizer, s.MAX_PROMPT_LENGTH, decoded(row["prompt"]), tools_of(row))


@pytest.mark.parametrize("record", [{"nums": [1.5, 2], "target": 3}, {"nums": [1, 2], "target": "3.5"}, {"target": 3}])
def test_a_new_task_of_expressions_cuts_no_number(record, rendered):
    from_record = module_of(made_of(rendered, "expression"), "prepare_data").from_record
    with pytest.raises(DataError, match="needs columns `nums`"):
        from_record(record)
    for numbers in ([], [-3, 5], [10**9, 1]):
        with pytest.raises(DataError, match="`nums` must be from 0"):
            from_record({"nums": numbers, "target": 2})
    for right in ({"nums": np.array([1, 2]), "target": np.int64(3)}, {"nums": "[1, 2]", "target": "3"}):  # CSV: text
        (example,) = from_record(right)
        assert example.ground_truth == {"target": 3, "numbers": [1, 2]}


def test_an_answer_that_is_no_text_is_what_a_cell_of_csv_has_for_it(rendered):
    home = made_of(rendered, "exact")
    for answer in (True, [1, "é"], {"a": None}, 3):
        examples = []
        for value in (answer, json.dumps(answer, ensure_ascii=False)):
            examples += module_of(home, "prepare_data").from_record({"question": "q", "answer": value})
        assert examples[0] == examples[1]


@pytest.mark.parametrize("reward", ["exact", "math", "regex", "json", "judge"])
@pytest.mark.parametrize("of", [lambda tools: tools, json.dumps], ids=["objects", "JSON text"])
def test_the_tools_of_a_record_are_those_of_its_prompt(reward, of, rendered):
    parameters = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}]
    from_record = module_of(made_of(rendered, reward), "prepare_data").from_record
    (example,) = from_record({"question": "q", "answer": "1", "tools": of(tools)})
    assert example.tools == tools and from_record({"question": "q", "answer": "1"})[0].tools is None


def test_several_right_answers_are_no_regular_expression(rendered):
    """As text of JSON a list is a set of characters, which `A`, `C` and a comma match."""
    from_record = module_of(made_of(rendered, "regex"), "prepare_data").from_record
    for answer in (["A", "C"], {"A": 1}, []):
        with pytest.raises(DataError, match="must be one regular expression"):
            from_record({"question": "q", "answer": answer})
    assert [from_record({"question": "q", "answer": each})[0].ground_truth for each in ("[AC]", 7)] == ["[AC]", "7"]


def test_an_exact_text_is_the_same_however_its_accents_are_stored(rendered):
    score = module_of(made_of(rendered, "exact"), "reward").compute_score
    texts = ("Caf\u00e9 noir", "cafe\u0301  noir")
    for truth, answer in itertools.product(texts, texts):
        assert score("t", f"<answer>{answer}</answer>", truth)["score"] == 1.0
    assert score("t", "<answer>cafe noir</answer>", texts[0])["score"] == 0.0


@pytest.mark.parametrize("reward", sorted({c["reward"] for c in ACCEPTED if c["source"] == "generate"}))
@pytest.mark.parametrize("stack", STACKS)
def test_a_generator_makes_as_many_problems_as_its_defaults_ask_for(reward, stack, rendered):
    home = made_of(rendered, reward, "generate")
    s = settings_of(home, STACK=stack)
    wanted = s.TRAIN_SIZE + s.DEV_SIZE + int(s.TEST_SIZE)
    examples = prepare.distinct(module_of(home, "prepare_data").generate(s))
    assert sum(1 for _ in itertools.islice(examples, wanted)) == wanted


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": 1, "b": [True, False, None, 1.5, 1e20, -3]},
        {"a": "x" * 50, "b": "y" * 50, "c": "z" * 50},
        {"a": {"b": [{"c": ["word"] * 30, "d": {}}] * 2}},
        {"quote": 'say "so"', "both": 'it\'s "so" and "so"', "path": "a\\b", "line": "a\nb", "é": "→"},
    ],
)
def test_settings_of_an_environment_become_plain_python(value, tmp_path):
    source = render("CONFIG = {{ config | literal }}\n", config=json.dumps(value))
    assert ast.literal_eval(source.partition(" = ")[2]) == value
    (tmp_path / "x.py").write_text(source)
    ruff = [Path(sys.executable).parent / "ruff", "format", "--no-cache", "--diff", "--config", ROOT / "pyproject.toml"]
    done = subprocess.run([*ruff, tmp_path / "x.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@functools.cache
def extensions():
    """The template's filters."""
    spec = importlib.util.spec_from_file_location("local_extensions", ROOT / "template/local_extensions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(text: str, **context) -> str:
    """As cookiecutter renders a template of ours, with its filters."""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, extensions=[extensions().literal]
    )
    return environment.from_string(text).render(**context)


def part_of(kind: str, part: str) -> str:
    """A part of a kind of reward, as rendered."""
    return render((ROOT / f"template/templates/{kind}.jinja").read_text(), part=part)


def written(checkout: Path, tmp_path: Path, **answers: str) -> Path:
    """The folder of one task of these answers."""
    (home,) = render_tasks(checkout, tmp_path, {"own": answers}, first=len(FREE)).values()
    return home


@pytest.mark.parametrize(
    ("env", "prompt", "response", "init"),
    [("gcd", 128, 64, "sft"), ("tower_of_hanoi", 256, 1024, "sft"), ("rush_hour", 256, 256, "base")],
)
def test_lengths_and_start_suit_the_environment(env, prompt, response, init, checkout, tmp_path):
    home = written(checkout, tmp_path, source="reasoning_gym", reward="environment", env=env, config="{}")
    try:
        s = settings_of(home)
        assert prompt <= s.MAX_PROMPT_LENGTH < 512
        assert response <= s.MAX_RESPONSE_LENGTH
        assert init == s.INIT
    finally:
        shutil.rmtree(home)


SIXTEEN_GB = [
    "",
    "method=ppo",
    "reward=tool_call method=ppo",
    "turns=multi",
    "turns=multi method=ppo",
    "source=reasoning_gym reward=environment env=rush_hour method=ppo",
    "source=reasoning_gym reward=environment env=arc_agi",
    "source=reasoning_gym reward=environment env=palindrome_partitioning method=ppo",
    "method=distill",
    "source=reasoning_gym reward=environment env=tower_of_hanoi method=distill",
]


@pytest.fixture
def largest_numbers(monkeypatch):
    """A CPU without bfloat16, which needs the most memory."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", cpu.ENVIRONMENT["VLLM_CPU_KVCACHE_SPACE"])
    monkeypatch.setattr(hardware, "number_bytes", lambda on_cpu: 4)


def ram_of(s) -> float:
    return sum(memory.estimate(memory.shapes(memory.EMBEDDED_CONFIG), memory_checks.plan(s, [])).ram.values())


@pytest.mark.parametrize("answers", SIXTEEN_GB)
def test_a_new_task_trains_on_16_gb_by_doctors_estimate(answers, checkout, tmp_path, largest_numbers):
    home = written(checkout, tmp_path, **dict(answer.split("=") for answer in answers.split()))
    try:
        teacher = {"TEACHER": "embedded"} if "distill" in answers else {}
        assert ram_of(load_settings(exported(home / "train.sh", {"STACK": "cpu", **teacher}))) < 16e9
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains_on_16_gb_by_doctors_estimate(task, largest_numbers):
    assert ram_of(task_settings(task)) < 16e9


def rows_of(s, part: str) -> list[dict]:
    return list(read_rows(s.data_dir / f"{part}.parquet"))


def test_the_template_offers_every_method():
    assert sorted(QUESTIONS["method"]) == METHODS


def test_every_question_and_choice_has_a_readable_prompt():
    prompts = QUESTIONS["__prompts__"]
    assert prompts.keys() == {name for name in QUESTIONS if not name.startswith("_")}
    for name, choices in CHOICES.items():
        assert prompts[name].keys() == {"__prompt__", *choices}


# ---- answers that cannot be


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        *[(f"task={name}", "task ") for name in ("Bad-Name", "class", "common", "9lives", "a" * 41, "a\n")],
        *[(f"reward={c['reward']} source={c['source']}", f"reward {c['reward']}: ") for c in REFUSED],
        ("turns=multi reward=judge", "reward judge: with turns=multi"),
        ("turns=endpoint source=verifiers env=a", "source verifiers: with turns=endpoint"),
        ("turns=multi reward=environment source=reasoning_gym", "reward environment: with turns=multi"),
        ("turns=multi source=file", "source file: with turns=multi it must be generate"),
        ("source=verifiers env=reverse-text", "source verifiers: needs turns=multi"),
        ("turns=multi source=verifiers", "env ''"),
        ("turns=multi source=verifiers env=a;b", "env 'a;b'"),
        ("turns=multi source=verifiers env=a:b/c", "env 'a:b/c'"),
        ("turns=multi source=openenv env=localhost", "env 'localhost': must be the URL of an OpenEnv server"),
        ("turns=multi source=verifiers env=a config=[1]", "config '[1]': must be a JSON object"),
        ("turns=multi method=dpo", "method dpo: is for single-turn tasks"),
        ("turns=multi method=distill", "method distill: is for single-turn tasks"),
        ("gpus=three", "gpus 'three': must be all, or 1, 2, 4"),
        ("gpus=0", "gpus '0'"),
        ("gpus=3", "gpus '3'"),
        ("model=gpt", "model 'gpt': must be a hub id owner/name"),
        ("model=a/b/c", "model 'a/b/c'"),
        ("model=a/$(id)", "model 'a/$(id)'"),
        ("model=/a/`id`", "model '/a/`id`'"),
        ('model=/a/"b', "model "),
        ("model=", "model ''"),
        ("env=chain_sum", "env: only for source=reasoning_gym"),
        ('config={"max_terms":3}', "config: only for source=reasoning_gym"),
        ("source=reasoning_gym reward=environment env=chain_sums", "did you mean chain_sum"),
        ("source=reasoning_gym reward=environment env=a/b", "env 'a/b'"),
        ("source=reasoning_gym reward=environment config=[1]", "config '[1]': must be a JSON object"),
        ('source=reasoning_gym reward=environment config={"a":', "must be a JSON object"),
        ('source=reasoning_gym reward=environment config={"min_terms":NaN}', "must be a JSON object"),
        ('source=reasoning_gym reward=environment config={"min_termz":3}', "min_terms"),
        ('source=reasoning_gym reward=environment config={"min_terms":"3"}', "Input should be a valid integer"),
        ('source=reasoning_gym reward=environment config={"min_terms":9,"max_terms":3}', "CONFIG of basic_arithmetic"),
        ('description=a"b', "description: "),
    ],
)
def test_answers_that_cannot_be_are_refused_in_one_line(answers, said):
    """As cookiecutter.json asks for it; that nothing is written then: above, with bad names."""
    first = {name: values[0] if isinstance(values, list) else values for name, values in QUESTIONS.items()}
    given = dict(answer.split("=", 1) for answer in answers.split(" "))
    first |= {"env": "basic_arithmetic" if given.get("source") == "reasoning_gym" else "", "description": "x"}
    with pytest.raises(extensions().Refused) as refused:
        extensions()._check(first | given)
    assert said in refused.value.message and "\n" not in refused.value.message


def environment(checkout: Path) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(checkout), "HOME": str(checkout)}


def test_rendering_again_from_the_answers_gives_the_same_task(checkout, own_home):
    answers = ["source=reasoning_gym", "reward=environment", "env=leg_counting", 'config={"max_animals": 4}']
    cookiecutter("template", "-o", "tasks", "--no-input", "task=again", "lora=yes", *answers, cwd=checkout)
    home = checkout / "tasks/again"
    before = {file: (home / file).read_bytes() for file in FILES}
    replay = ["template", "-o", "tasks", "-f", "--replay-file", str(home / "answers.json")]
    result = cookiecutter(*replay, cwd=checkout)
    assert result.returncode == 0, result.stdout
    assert {file: (home / file).read_bytes() for file in FILES} == before


@pytest.mark.medium
def test_rendering_again_writes_over_no_edited_file(checkout, own_home):
    cookiecutter("template", "-o", "tasks", "--no-input", "task=edited", "source=file", cwd=checkout)
    home = checkout / "tasks/edited"
    (home / "reward.py").write_text("# mine\n")
    (home / "data.jsonl").write_text("{}\n")
    (home / "notes.txt").write_text("mine\n")
    (home / "evaluate.py").unlink()
    before = {file.name: file.read_bytes() for file in home.iterdir()}
    replay = ["template", "-o", "tasks", "-f", "--replay-file", str(home / "answers.json")]
    result = cookiecutter(*replay, cwd=checkout)
    (said,) = result.stdout.splitlines()
    assert result.returncode != 0 and said.startswith(f"error: {home}: edited since: data.jsonl, reward.py; nothing")
    assert {file.name: file.read_bytes() for file in home.iterdir()} == before
    assert cookiecutter(*replay, "-s", cwd=checkout).returncode == 0  # files that are there stay
    assert {file.name: file.read_bytes() for file in home.iterdir() if file.name in before} == before
    assert (home / "evaluate.py").is_file() and not (home / ".before").exists()
    for name in ("reward.py", "data.jsonl"):
        (home / name).unlink()
    assert cookiecutter(*replay, cwd=checkout).returncode == 0
    assert "def compute_score" in (home / "reward.py").read_text() and (home / "notes.txt").read_text() == "mine\n"


@pytest.mark.parametrize(("changed", "said"), [({"task": "../evil"}, "task '../evil'"), ({"gpus": "3"}, "gpus '3'")])
def test_a_replay_of_bad_answers_is_refused_and_leaves_nothing(changed, said, checkout, own_home, tmp_path):
    answers = json.loads((ROOT / "tasks/countdown/answers.json").read_text())
    answers["cookiecutter"] |= {"task": "replayed"} | changed
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    before = tree(checkout.parent)
    result = cookiecutter("template", "-o", "tasks", "--replay-file", tmp_path / "answers.json", cwd=checkout)
    assert result.returncode != 0
    assert len(result.stdout.splitlines()) == 1 and result.stdout.startswith(f"error: {said}")
    assert tree(checkout.parent) == before


@pytest.mark.parametrize("task", MADE)
def test_a_task_has_the_files_of_the_template_and_its_answers(task):
    home = ROOT / "tasks" / task
    answers = json.loads((home / "answers.json").read_text())["cookiecutter"]
    files = FILES if answers["turns"] == "single" else OF_EPISODES
    assert {path.name for path in home.iterdir() if path.is_file()} >= files
    assert answers.keys() == {name for name in QUESTIONS if not name.startswith("_")}
    assert answers["task"] == task
    assert all(answers[name] in choices for name, choices in CHOICES.items())
