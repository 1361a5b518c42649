"""The runs in trackio's dashboard (https://github.com/gradio-app/trackio): a project for each task.

trackio's own `trackio.log` writes one run at a time, live. What is read back from many runs goes to its store in bulk,
as its import of CSV files does (trackio/imports.py).
"""

import contextlib
import io
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path


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
        rows = [(step, row) for part in (new.steps, new.evaluations) for step, row in sorted(part.items())]
        ids = [f"{run}-step-{step}" for step in sorted(new.steps)]
        ids += [f"{run}-eval-{step}" for step in sorted(new.evaluations)]
        traces: dict[tuple[str, int], list[dict]] = {}
        for sample in new.samples.values():
            traces.setdefault((sample.kind, sample.step), []).append(self._trace(sample))
        rows += [(step, {kind: found}) for (kind, step), found in traces.items()]
        ids += [f"{run}-{next(iter(new.samples))}-{kind}-{step}" for kind, step in traces]
        if rows:
            self.store.bulk_log(
                project=project,
                run=run,
                metrics_list=[row for _, row in rows],
                steps=[step for step, _ in rows],
                timestamps=[now] * len(rows),
                config=config,
                log_ids=ids,
            )
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
                levels=["error" if each.rule in ("nan", "collapse") else "warn" for each in found],
                steps=[each.step for each in found],
                alert_ids=[f"{run}-{key}" for key in new.findings],
            )

    def _trace(self, sample) -> dict:
        messages = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.response}]
        told = {"kind": sample.kind, "ground_truth": sample.ground_truth, **sample.rewards}
        told["status"] = f"score {sample.rewards.get('score', float('nan')):.3g}"  # a column of the list
        return self.trackio.Trace(messages, told)._to_dict("", "", sample.step)

    @contextlib.contextmanager
    def served(self, port: int) -> Iterator[None]:
        """Serve the dashboard on loopback until the end of the block."""
        with contextlib.redirect_stdout(io.StringIO()):  # an address with a token to write
            server, *_ = self.trackio.show(
                open_browser=False,
                block_thread=False,
                host="127.0.0.1",
                server_port=port,
                share=False,
                mcp_server=False,
            )
        try:
            yield
        finally:
            server.close()
