"""The runs in tensorboard, for stacks whose packages leave no room for trackio (a100: huggingface-hub below 1)."""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from tasks.common.settings import SettingsError


class Tensorboard:
    """See ``monitor.Follower``; the event files are in ``folder``."""

    name = "tensorboard"

    def __init__(self, folder: Path):
        self.folder, self.writers = folder, {}

    def remove(self, run_dir: Path) -> None:
        if writer := self.writers.pop(run_dir, None):
            writer.close()
        shutil.rmtree(self.folder / run_dir.parent.name / run_dir.name, ignore_errors=True)

    def add(self, run_dir: Path, new, config: dict) -> None:
        """Write the ``monitor.Seen`` of a run."""
        from torch.utils.tensorboard import SummaryWriter

        if run_dir not in self.writers:
            self.writers[run_dir] = SummaryWriter(self.folder / run_dir.parent.name / run_dir.name)
            self.writers[run_dir].add_text("settings", _as_code(json.dumps(config, indent=1)))
        writer = self.writers[run_dir]
        for part in (new.steps, new.evaluations):
            for step, row in sorted(part.items()):
                for name, value in row.items():
                    writer.add_scalar(name, value, step)
        for when, row in new.gpus.items():
            for name, value in row.items():
                writer.add_scalar(name, value, round(when), walltime=when)  # a step for each second
        for key, sample in new.samples.items():
            said = [f"{'model' if i % 2 == 0 else 'environment'}: {text}" for i, text in enumerate(sample.turns)]
            said = "\n\n".join(said or [sample.response])
            text = f"{sample.prompt}\n\n{said}\n\nground truth: {sample.ground_truth}\n{sample.rewards}"
            writer.add_text(f"{sample.kind}/{key.rpartition('-')[2]}", _as_code(text), sample.step)
        for each in new.findings.values():
            writer.add_text(f"health/{each.rule}", each.text, each.step)
        writer.flush()

    @contextlib.contextmanager
    def served(self, port: int) -> Iterator[None]:
        """Serve the dashboard on loopback until the end of the block. Raises SettingsError when it does not start."""
        from tensorboard import program

        server = program.TensorBoard()
        server.configure(logdir=str(self.folder), host="127.0.0.1", port=port, reload_interval=5, load_fast="false")
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # it says that TensorFlow is not installed
                server.launch()  # threads, which end with this process
        except program.TensorBoardServerException as error:
            raise SettingsError(f"PORT={port}: tensorboard did not start: {error}") from error
        try:
            yield
        finally:
            for writer in self.writers.values():
                writer.close()


def _as_code(text: str) -> str:
    """As a block of Markdown in which nothing is read as Markdown or HTML: each line indented by a tab."""
    return "".join(f"\t{line}\n" for line in text.splitlines())
