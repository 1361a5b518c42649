"""The socket over which verl 0.9.1's trainer hands new weights to vLLM on the same machine, for this launch alone.

verl's is /tmp/rl-colocate-zmq-JOB-..., where JOB is 01000000 in every Ray that a training starts itself. Two trainings
at once would take each other's weights, and any user of the machine could send pickles there.
"""

import os
from pathlib import Path

from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from tasks.common.leftovers import LAUNCH
from tasks.common.verl_plugins.expect import expect

_VERLS = "ipc:///tmp/"

for _function in (ServerAdapter.__init__, vLLMColocateWorkerExtension._get_zmq_handle):
    expect(_function, f'f"{_VERLS}rl-colocate-zmq-{{job_id}}-')


def own(handle: str) -> str:
    """verl's address in the launch's folder, which no other user may enter; as it is on another node of a cluster."""
    folder = os.environ.get(LAUNCH)
    return handle.replace(_VERLS, f"ipc://{folder}/") if folder and Path(folder).is_dir() else handle


class OwnSocketAdapter(ServerAdapter):
    """The trainer's end; patches.py lets verl make it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.zmq_handle = own(self.zmq_handle)


class OwnSocketExtension(vLLMColocateWorkerExtension):
    """vLLM's end, a base of the stacks' worker extensions."""

    def _get_zmq_handle(self) -> str:
        return own(super()._get_zmq_handle())
