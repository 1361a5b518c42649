"""`make export OUTPUT=folder`: the trained model as a folder for the hub, with a card; PUSH=owner/name uploads it."""

import html
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from verl_tasks.files import folder_beside, read_json, write_json, write_text
from verl_tasks.models.find import EMBEDDED, damage, embedded_folder, is_hub_id, whole_model
from verl_tasks.models.merge import base_of, is_adapter
from verl_tasks.reports import run_report
from verl_tasks.reports.overview import checkpoint_of, evaluations
from verl_tasks.reports.run_report import Section, Table
from verl_tasks.rewards.answers import number
from verl_tasks.runs import launches
from verl_tasks.runs.folder import readable
from verl_tasks.runs.run import Run
from verl_tasks.runs.secrets import masked
from verl_tasks.settings import ROOT, Command, Settings, SettingsError, artifacts
from verl_tasks.text import one_line

# What transformers and vLLM load; a checkpoint's folder also holds the trainer's own files.
PARTS = ("*.safetensors", "*config.json", "*.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
PARTS += ("vocab.json", "merges.txt", "chat_template.jinja", "adapter_model.*")
EMBEDDED_ID = f"HuggingFaceTB/{EMBEDDED}"
CURVES = "curves.svg"
# Of the launch's record; `make report` has all packages.
RECORDED = ("stack", "last launch", "commit", "uncommitted changes", "python")
RECORDED += ("torch", "vllm", "verl", "transformers", "trl", "ray")
LIMITS = """\
- It was evaluated on this task's held-out prompts alone.
- The intervals are over prompts; they do not show how much another seed would differ.
- What the reward does not measure, the training did not improve."""


def check(command: Command, run: Run | None) -> None:
    """Raise SettingsError for what cannot be exported, before anything is merged."""
    if run is None:
        raise SettingsError("export: there is no trained model yet: run `make train`, or set RUN")
    if not command.OUTPUT:
        raise SettingsError("OUTPUT is empty: give the folder to write")
    if (output := Path(command.OUTPUT).expanduser()).exists():
        raise SettingsError(f"OUTPUT={output}: exists already; give a folder that does not")
    if command.PUSH and not is_hub_id(command.PUSH):
        raise SettingsError(f"PUSH={command.PUSH}: is no hub id (owner/name)")
    if command.PUSH and (os.environ.get("CI") or not sys.stdin.isatty()):
        raise SettingsError(f"PUSH={command.PUSH}: asks before it uploads, which needs a terminal")


def base_id(s: Settings, command: Command, start: str) -> str:
    """How others find the base model: BASE, the hub id, or the last part of a folder's path."""
    if command.BASE:
        return command.BASE
    if s.MODEL == "embedded" or Path(start) == embedded_folder():
        return EMBEDDED_ID
    return start if is_hub_id(start) and not Path(start).is_dir() else Path(start).name


def licence(base: str, start: str) -> str:
    """The licence that the base model's own card names, in the hub's spelling; "unknown" where none is at hand."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    if base == EMBEDDED_ID:
        return "apache-2.0"
    try:
        card = Path(start) / "README.md" if Path(start).is_dir() else try_to_load_from_cache(start, "README.md")
        return ModelCard.load(card).data.license or "unknown"
    except (OSError, TypeError, ValueError, AttributeError, YAMLError):
        return "unknown"


def export(s: Settings, command: Command, run_dir: Path, model: str) -> str:
    """Write ``model``, a checkpoint of ``run_dir``, to OUTPUT, and upload it where PUSH says so. Returns what it did.

    MERGE=1 writes a LoRA adapter merged into its base model. Raises SettingsError, also for files that cannot be read.
    """
    output = Path(command.OUTPUT).expanduser().absolute()
    source = Path(whole_model(model) if command.MERGE else model)
    if not is_adapter(source) and (problem := damage(source)):
        raise SettingsError(f"{source}: {problem}; take another STEP")
    start, step = run_report.began_with(run_dir)["base"], (checkpoint_of(model) or [None])[-1]
    base = base_id(s, command, base_of(source) if is_adapter(source) else start)
    with folder_beside(output) as partial:
        for file in sorted({file for pattern in PARTS for file in source.glob(pattern) if file.is_file()}):
            shutil.copy2(file, partial / file.name)
        if is_adapter(source):
            config = read_json(source / "adapter_config.json")
            write_json(partial / "adapter_config.json", config | {"base_model_name_or_path": base})
        trained = [launch / "task" / s.reward_file.name for launch in launches.launches(run_dir)[-1:]]
        shutil.copy2(next(filter(Path.is_file, trained), s.reward_file), partial)  # today's may be another
        with readable(run_dir):
            written = card(s, run_dir, output.name, base, licence(base, start), is_adapter(source), step)
        for name, text in written.items():
            write_text(partial / name, text)
    said = [f"written: {output}"]
    if others := other_sampling(output, s):
        ours = f"temperature={s.EVAL_TEMPERATURE:g}, top_p={s.TOP_P:g}"
        said.append(f"its generation_config.json has the base model's {others}, by which others sample it; here {ours}")
    if is_adapter(source) and "/" not in base:
        said.append(f"its base model {base} is a folder of this machine: others need its hub id, BASE=owner/name")
    if "license: unknown" in written["README.md"]:
        said.append("the base model's licence is not known: set `license` in README.md before you publish it")
    if command.PUSH:
        said.append(push(output, command.PUSH))
    return "\n  ".join(said)


def other_sampling(folder: Path, s: Settings) -> str:
    """What generation_config.json says of sampling that was not so in our evaluations, in words; transformers and vLLM
    follow it where a user gives nothing."""
    found = read_json(folder / "generation_config.json")
    ours = {"temperature": s.EVAL_TEMPERATURE, "top_p": s.TOP_P, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    differs = {name: number(found[name]) for name, value in ours.items() if found.get(name) not in (None, value)}
    return ", ".join(f"{name}={value:g}" for name, value in differs.items() if value is not None)


def card(
    s: Settings, run_dir: Path, name: str, base: str, licence_id: str, adapter: bool, step: int | None
) -> dict[str, str]:
    """The model card, README.md, and its picture, by file name; the facts are those of `make report`, up to ``step``
    (None: all)."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    run = Run.read(run_dir)
    made, metrics = run.record, {number: row for number, row in run.metrics.items() if step is None or number <= step}
    launch = launches.last(run_dir)
    measured = evaluations(run_dir, step)
    results = [
        EvalResult("text-generation", s.TASK, s.TASK, metric, value["value"], dataset_split="test")
        for metric, value in (measured[-1][2]["metrics"].items() if measured else ())
        if metric == "accuracy" or metric.startswith("pass@")
    ]
    data = ModelCardData(
        license=licence_id,
        base_model=base if is_hub_id(base) else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["verl", s.METHOD, s.TASK],
        model_name=name if results else None,
        eval_results=results or None,
    )
    minutes = sum(row.get("timing_s/step", 0.0) for row in metrics.values()) / 60
    drawn, steps = run_report.curves(metrics).pictures[:1], f"{len(metrics)} step{'s' * (len(metrics) != 1)}"
    trained = f"{s.METHOD} of `{base}` on the task `{s.TASK}`: {steps}, {minutes:.0f} minutes of training"
    where = f"{s.NNODES} x {s.N_GPUS} GPUs" if s.STACK != "cpu" else "a CPU"
    body = [f"# {name}", f"{'A LoRA adapter' if adapter else 'A whole model'}: {trained} on {where}."]
    body += [f"![{html.escape(drawn[0].text)}]({CURVES})"] if drawn else []
    other = replace(run_report.settings(run_dir, made, launch), title="Settings that are not the task's defaults")
    sections = [run_report.evaluation(run_dir, made, step), other]
    body += [markdown(section) for section in (*sections, _recorded(run_report.code(run_dir, launch)))]
    body += [f"## Reward\n\nThe reward is [{s.reward_file.name}]({s.reward_file.name}).", f"## Limits\n\n{LIMITS}"]
    text = without_paths(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(body) + "\n")
    ModelCard(text)  # raises where its header is no card's
    return {"README.md": text} | ({CURVES: drawn[0].content.decode()} if drawn else {})


def _recorded(code: Section) -> Section:
    """The rows of RECORDED, and the data's digests."""
    rows = [row for table in code.tables for row in table.rows]
    shown = [row for row in rows if row[0] in RECORDED or row[0].startswith("sha256 ")]
    return Section(code.title, code.lines, tables=[Table(["", ""], shown)])


def markdown(section: Section) -> str:
    """A section of the report, without what is folded there."""
    tables = [_table(table) if table.rows else "None." for table in section.tables if not table.folded]
    return "\n\n".join([f"## {section.title}", *(masked(line) for line in section.lines), *tables])


def _table(table: Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _cell(value: object) -> str:
    return html.escape(one_line(masked(str(value)), 300), quote=False).replace("|", "\\|")


def without_paths(text: str) -> str:
    """``text`` with this machine's folders named as a reader knows them."""
    for folder, name in ((artifacts(), "artifacts"), (ROOT, "."), (Path.home(), "~")):
        if len(folder.parts) > 1:  # HOME may be / or empty
            text = re.sub(rf"{re.escape(str(folder))}(?=[/\s)`,;]|$)", name, text)
    return text


def push(folder: Path, name: str) -> str:
    """Ask, then upload ``folder`` as the private repository ``name``. Raises SettingsError where the hub refuses."""
    from huggingface_hub import HfApi, ModelCard

    print(f"  {folder} has {', '.join(sorted(file.name for file in folder.iterdir()))}")
    if input(f"  upload it to the hub as {name}, private? [y/N] ").strip().lower() not in ("y", "yes"):
        return "not uploaded"
    try:
        ModelCard.load(folder / "README.md").validate()
        HfApi().create_repo(name, private=True, exist_ok=True)
        return f"uploaded: {HfApi().upload_folder(repo_id=name, folder_path=folder)}"
    except (OSError, ValueError) as error:  # of the hub, too
        raise SettingsError(f"PUSH={name}: {one_line(masked(str(error)), 300)}; {folder} stays") from error
