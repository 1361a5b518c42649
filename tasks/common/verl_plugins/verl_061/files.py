"""What verl 0.6.1 writes for people must not end a training: metrics as they come, samples where there is room.

Its file of metrics (utils/tracking.py:243) keeps lines back until there are 8 kB, and fails on tensors, which are among
RL's metrics. A disk that is full for the samples (trainer/ppo/ray_trainer.py:428) ends the training. Test:
tests/test_a100_stack.py.
"""

import json

from verl.trainer.ppo import ray_trainer
from verl.utils import tracking

from verl_tasks.verl_plugins.expect import expect

expect(tracking.FileLogger.__init__, 'self.fp = open(self.filepath, "w")')
expect(tracking.FileLogger.log, 'self.fp.write(json.dumps(data) + "\\n")')
expect(ray_trainer.RayPPOTrainer._dump_generations, 'f.write("\\n".join(lines) + "\\n")')


class FileLogger(tracking.FileLogger):
    """verl's, a line at a time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fp.reconfigure(line_buffering=True)

    def log(self, data, step):
        self.fp.write(json.dumps({"step": step, "data": data}, default=lambda value: value.item()) + "\n")


_dump_generations = ray_trainer.RayPPOTrainer._dump_generations


def dump_generations(self, *args, **kwargs) -> None:
    """verl's; an error is a line in the log."""
    try:
        _dump_generations(self, *args, **kwargs)
    except (OSError, ValueError) as error:
        print(f"the samples of step {self.global_steps} were not written: {error}", flush=True)


tracking.FileLogger = FileLogger
ray_trainer.RayPPOTrainer._dump_generations = dump_generations
