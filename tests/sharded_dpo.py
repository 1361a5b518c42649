"""What test_dpo.py runs with torchrun: DPO in float32 on a CPU, in shards where there are several processes.

accelerate has FSDP for GPUs alone; told that the processes are another device's, it shards on a CPU too.
"""

import os
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from verl_tasks.settings import load_settings
from verl_tasks.training import trl_dpo
from verl_tasks.training.methods import dpo

_init = AcceleratorState.__init__


def _init_with_fsdp(self, *args, **kwargs):
    PartialState(cpu=True)
    if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    _init(self, *args, **kwargs)


def main() -> None:
    AcceleratorState.__init__ = _init_with_fsdp
    dpo.sharded = lambda s: True
    trl_dpo.cpu_dtype = lambda: "float32"
    start, pairs, run_dir = sys.argv[1:]
    trl_dpo.train(load_settings(), start, pairs, Path(run_dir), Path(os.environ["VERL_FILE_LOGGER_PATH"]))


if __name__ == "__main__":
    main()
