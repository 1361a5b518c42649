"""How far rehearse's prediction is off for each recorded run: PYTHONPATH=. python tests/benchmarks/rehearse_errors.py

It writes docs/results/rehearse-errors.json. `step_error`: the run is predicted by those that are not like it.
"""

from tasks.common.files import write_json
from tasks.common.machine import speed
from tests.helpers import ROOT

FILE = ROOT / "docs/results/rehearse-errors.json"


def errors() -> dict[str, dict[str, float]]:
    """By run: shares by which seconds and memory are off, and the measured seconds of a step."""
    off = speed.left_out(speed.recorded())
    return {
        run.run.name: {
            "step_error": round(off[run.run.name], 3),
            "step_seconds": round(run.total, 1),
            "memory_error": round(speed.memory_off(run), 3),
        }
        for run in speed.recorded()
    }


if __name__ == "__main__":
    write_json(FILE, errors())
