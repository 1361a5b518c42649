"""docs/SETTINGS.md, made of the variables in the code: PYTHONPATH=. python -m tests.settings_page > docs/SETTINGS.md"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import Field, fields

from verl_tasks.rewards.judge import Judge
from verl_tasks.settings import STACKS, Command, Settings, shown_default, stack

HEAD = """# Settings

Every variable, written by `tests/settings_page.py`. Give one on make's command line
(`make train TASK=countdown LR=2e-6`) or in the environment. `make settings TASK=countdown` shows a task's values and
where each comes from ([order of precedence](QUICKSTART.md#stages-and-settings)). `-` is empty.
"""


def sections(cls: type) -> dict[str, list[str]]:
    """The names of the fields of ``cls`` by the comments that head them in its source."""
    found, section = {}, ""
    for line in inspect.getsource(cls).splitlines():
        if comment := re.fullmatch(r"    # (.+)", line):
            section = comment[1]
            found[section] = []
        elif name := re.match(r"    ([A-Z_]+): ", line):
            found[section].append(name[1])
    return found


def default(f: Field) -> str:
    """A variable's default, and that of each stack where it differs."""
    own = {name: getattr(stack(name), "DEFAULTS", {}).get(f.name) for name in STACKS}
    shared = shown_default(f)
    return "; ".join(
        [f"`{shared}`", *(f"`{name}`: `{value}`" for name, value in own.items() if value and value != shared)]
    )


def row(f: Field) -> str:
    help = f.metadata["help"].replace("|", "\\|")
    return f"| `{f.name}` | {default(f)} | {help} |"


def lines() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    by_name = {f.name: f for f in fields(Settings)}
    of_single = [f for f in fields(Command) if f.name != "STAGE"]
    tables = {title: [by_name[name] for name in names] for title, names in sections(Settings).items()}
    tables |= {"single commands": of_single, "a judge (JUDGE.md)": list(fields(Judge))}
    for title, table in tables.items():
        title = re.sub(r" \((\S+\.md)\)", r" ([\1](\1))", title)
        yield f"## {title[0].upper()}{title[1:]}\n"
        yield "| variable | default | meaning |\n|---|---|---|"
        yield from map(row, table)
        yield ""


def settings_page() -> str:
    """The text of docs/SETTINGS.md."""
    return "\n".join(lines()).rstrip() + "\n"


if __name__ == "__main__":
    print(settings_page(), end="")
