"""The runs in trackio's dashboard (https://github.com/gradio-app/trackio): a project for each task."""

import contextlib
import io
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

LEVELS = {"nan": "error", "collapse": "error", "evaluation": "info"}


class Trackio:
    """See ``monitor.Follower``; the store is in ``folder``."""

    name = "trackio"

    def __init__(self, folder: Path):
        os.environ["TRACKIO_DIR"] = str(folder)  # read when trackio is imported
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self.trackio, self.store = trackio, SQLiteStorage

    def remove(self, run_dir: Path) -> None:
        self.store.delete_run(run_dir.parent.name, run_dir.name)

    def add(self, run_dir: Path, new, config: dict) -> None:
        """Write the ``monitor.Seen`` of a run."""
        project, run, now = run_dir.parent.name, run_dir.name, datetime.now(UTC).isoformat()
        rows = [(f"{run}-step-{step}", step, row) for step, row in sorted(new.steps.items())]
        rows += [(f"{run}-eval-{step}", step, row) for step, row in sorted(new.evaluations.items())]
        traces: dict[tuple[str, int], list[dict]] = {}
        for sample in new.samples.values():
            traces.setdefault((sample.kind, sample.step), []).append(self._trace(sample))
        first = next(iter(new.samples), "")
        rows += [(f"{run}-{first}-{kind}-{step}", step, {kind: found}) for (kind, step), found in traces.items()]
        if rows:
            ids, steps, values = map(list, zip(*rows, strict=True))
            times = [now] * len(rows)
            self.store.bulk_log(project, run, values, steps=steps, timestamps=times, config=config, log_ids=ids)
        if new.gpus:
            times = [datetime.fromtimestamp(time, UTC).isoformat() for time in new.gpus]
            marks = [f"{run}-gpu-{time}" for time in new.gpus]
            self.store.bulk_log_system(project, run, list(new.gpus.values()), times, marks)
        if new.findings:
            found = list(new.findings.values())
            self.store.bulk_alert(
                project=project,
                run=run,
                titles=[each.rule.replace("_", " ") for each in found],
                texts=[each.text for each in found],
                levels=[LEVELS.get(each.rule, "warn") for each in found],
                steps=[each.step for each in found],
                alert_ids=[f"{run}-{key}" for key in new.findings],
            )

    def _trace(self, sample) -> dict:
        said = [("assistant" if place % 2 == 0 else "user", text) for place, text in enumerate(sample.turns)]
        said = [("user", sample.prompt), *(said or [("assistant", sample.response)])]
        messages = [{"role": role, "content": text} for role, text in said]
        told = {"kind": sample.kind, "ground_truth": sample.ground_truth, **sample.rewards}
        told["status"] = f"score {sample.rewards.get('score', float('nan')):.3g}"  # a column of the list
        return self.trackio.Trace(messages, told)._to_dict("", "", sample.step)

    @contextlib.contextmanager
    def served(self, port: int) -> Iterator[None]:
        """Serve the dashboard on loopback until the end of the block."""
        with contextlib.redirect_stdout(io.StringIO()):  # an address with a token to write
            off = dict.fromkeys(("open_browser", "block_thread", "share", "mcp_server"), False)
            server, *_ = self.trackio.show(host="127.0.0.1", server_port=port, **off)
        try:
            yield
        finally:
            server.close()
