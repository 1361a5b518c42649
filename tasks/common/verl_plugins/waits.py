"""What a training's processes say of themselves: signs of life, what Ray waits for, and on a signal their stacks.

patches.py loads this in every verl process (tasks/common/alive.py).
"""

import faulthandler
import os
import sys
import threading
import time

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_tasks.alive import STACKS, beat, waits_for
from verl_tasks.leftovers import LAUNCH

POLL_SECONDS = 3
SECONDS_TO_START = 300  # until a process that will not use Ray is left alone

_forward_steps = {kind: kind.forward_step for kind in (FSDPEngineWithLMHead, FSDPEngineWithValueHead)}


def _beating(kind):
    def forward_step(self, *args, **kwargs):
        result = _forward_steps[kind](self, *args, **kwargs)
        beat()
        return result

    return forward_step


for _kind in _forward_steps:
    _kind.forward_step = _beating(_kind)


def pending(actors: dict, groups: dict) -> str:
    """What Ray has not started, in words. ``actors``, ``groups``: its tables (ray._private.state)."""
    names = [each.get("ActorClassName") or each.get("Name") or "an actor" for each in actors.values() if _waits(each)]
    counted = [f"{names.count(name)} x {name.rpartition('.')[2]}" for name in dict.fromkeys(names)]
    bundles = [each["bundles"] for each in groups.values() if each.get("state") == "PENDING"]
    needs = [", ".join(f"{value:g} {name}" for b in each.values() for name, value in b.items()) for each in bundles]
    said = [f"Ray to start {', '.join(counted)}"] if counted else []
    return "; ".join([*said, *(f"Ray to find room for {need}" for need in needs)])


def _waits(actor: dict) -> bool:
    return actor.get("State") in ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING")


def _tell() -> None:
    """In the process that started the training: what Ray waits for, until the process ends."""
    until = time.monotonic() + SECONDS_TO_START
    while not ((ray := sys.modules.get("ray")) and hasattr(ray, "is_initialized") and ray.is_initialized()):
        if time.monotonic() > until:
            return
        time.sleep(POLL_SECONDS)
    from ray._private.worker import SCRIPT_MODE, global_worker

    if global_worker.mode != SCRIPT_MODE:
        return
    last = ""
    while ray.is_initialized():
        try:
            found = pending(ray._private.state.actors(), ray.util.placement_group_table())
        except Exception as error:  # only people look at it
            found = f"Ray, which does not answer ({type(error).__name__})"
        if found != last:
            waits_for(found, "ray")
            last = found
        time.sleep(POLL_SECONDS)


def start() -> None:
    """Answer STACKS, and say what Ray waits for; again in each fork, which has no thread of its parent."""
    if os.environ.get(LAUNCH):
        faulthandler.register(STACKS, file=2, all_threads=True)
        threading.Thread(target=_tell, daemon=True, name="waits").start()


start()
os.register_at_fork(after_in_child=start)
