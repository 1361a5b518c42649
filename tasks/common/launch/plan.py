"""One training, planned before it runs: `make config` shows the plan, `train.py` carries it out."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.common.launch.task import environment
from tasks.common.runs.folder import last_step, next_metrics_file
from tasks.common.settings import Settings, method, stack
from tasks.common.training import tracking, verl_config, verl_versions

# What torchrun tells its only worker. Without it one process less imports torch; the store takes any free port.
ONE_WORKER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ONE_WORKER |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@dataclass(frozen=True, eq=False)
class Plan:
    """One run of a trainer: the SFT warm-up, or a round of RL or DPO, from a checkpoint of it if there is one."""

    name: str  # on the screen and of the log: SFT, DPO, GRPO, ...
    settings: Settings  # for the record; its TRAIN_SEED is the round's
    start: str  # the model: a folder or a hub id
    run_dir: Path
    resumed: int  # step of the last checkpoint; 0: none
    steps: int  # in total: training steps; of SFT and DPO optimizer steps
    command: list[str]
    config: dict | None  # the trainer's, resolved; None: TRL makes it
    environment: dict[str, str]  # added to that of this process
    metrics: Path  # a JSON line a step, of this launch
    log: Path
    shown: tuple[str, str]  # of the progress bar: a name, and the metric

    def comments(self) -> str:
        """The plan as YAML comments, for the head of the config."""
        lines = {
            "start": self.start,
            "run folder": self.run_dir,
            "resumes from step": self.resumed,
            "steps": self.steps,
            "command": shlex.join(self.command),
        }
        return "\n".join(f"# {name}: {' '.join(str(value).splitlines())}" for name, value in lines.items())


def planned(
    name: str,
    s: Settings,
    run_dir: Path,
    start: str,
    *,
    number: int = 1,
    data: Path | None = None,
    overrides: Sequence[str] = (),
    anyway: bool = True,
) -> Plan:
    """Plan a training of ``run_dir`` from the model ``start``; ``name`` is sft or the METHOD. Writes nothing.

    ``number``: the round; each has other prompts and samples. ``data``: the demonstrations of SFT, the pairs of DPO.
    ``overrides``: hydra's for RL, after ours. ``anyway``: train also where no first sample is right. Raises
    SettingsError.
    """
    seed = s.TRAIN_SEED + number - 1
    seeded = replace(s, SEED=seed)  # for the trainer of RL or DPO; the data keep their SEED
    metrics = next_metrics_file(run_dir)
    own = tracking.environment(s, run_dir) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    torchrun, told = ["tasks.common.training.torchrun", f"--nproc_per_node={s.N_GPUS}", "-m"], {}
    if s.N_GPUS == 1:
        torchrun, told = [], ONE_WORKER
    config, shown = None, ("loss", "train/loss")
    if name == "sft":
        ours = verl_config.sft_overrides(s, start, run_dir, data)
        command = [*torchrun, "tasks.common.verl_plugins.sft", *verl_config.HYDRA, *ours]
        own |= told | {"SEED": str(s.SEED), "SFT_LOSS": str(s.SFT_LOSS)}  # verl_plugins/sft.py
        config = verl_config.resolved("sft_trainer_engine", ours)
    elif name == "dpo":
        command = [*torchrun, "tasks.common.training.trl_dpo", start, str(data), str(run_dir)]
        own = environment(seeded) | own | told
    else:
        # verl has no keys for these three.
        own |= trainer_module(s) | {"SEED": str(seed), "KEEP": str(s.KEEP), "PATIENCE": str(s.PATIENCE)}
        own["ANYWAY"] = str(int(anyway))
        sent = verl_config.sent_environment(environment(seeded) | own)
        ours = [*sent, *verl_config.rl_overrides(seeded, start, run_dir)]
        command = [
            *getattr(stack(s.STACK), "LAUNCHER", []),
            "verl.trainer.main_ppo",
            *verl_config.HYDRA,
            *ours,
            *overrides,
        ]
        config, shown = verl_config.resolved("ppo_trainer", ours, overrides), ("reward", "critic/score/mean")
    return Plan(
        name=name.upper(),
        settings=s if name == "sft" else replace(s, TRAIN_SEED=seed),
        start=start,
        run_dir=run_dir,
        resumed=last_step(run_dir),
        steps=s.SFT_STEPS if name == "sft" else s.STEPS,
        command=[sys.executable, "-m", *command],
        config=config,
        environment=own,
        metrics=metrics,
        log=run_dir / f"logs/{name}-{metrics.stem}.log",
        shown=shown,
    )


def trainer_module(s: Settings) -> dict[str, str]:
    """The environment in which every verl process loads the method's trainer, where verl lets one choose it."""
    own = getattr(method(s.METHOD), "TRAINER", "tasks.common.verl_plugins.trainer")
    modules = [os.environ.get("VERL_USE_EXTERNAL_MODULES"), own if verl_versions.has_own_trainers(s) else None]
    return {"VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules))}
