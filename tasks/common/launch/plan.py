"""One training, planned before it runs: `make config` shows the plan, `train.py` carries it out."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_tasks.launch.task import exported
from verl_tasks.runs.run import Run
from verl_tasks.settings import Settings, stack
from verl_tasks.training import tracking, verl_config, verl_versions

# What torchrun tells its only worker. Without it one process less imports torch; the store takes any free port.
ONE_WORKER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
ONE_WORKER |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LOSS, REWARD = ("loss", "train/loss"), ("reward", "critic/score/mean")


@dataclass(frozen=True, eq=False)
class Plan:
    """One run of a trainer: the SFT warm-up, or a round of RL or DPO, from a checkpoint of it if there is one."""

    name: str  # on the screen and of the log: SFT, DPO, GRPO, ...
    settings: Settings  # for the record; its TRAIN_SEED is the round's
    start: str  # the model: a folder or a hub id
    run: Run  # as it is before
    steps: int  # in total: training steps; of SFT and DPO optimizer steps
    command: list[str]
    environment: dict[str, str]  # added to that of this process
    config: dict | None = None  # the trainer's, resolved; None: TRL makes it
    shown: tuple[str, str] = LOSS  # of the progress bar: a name, and the metric

    @property
    def metrics(self) -> Path:
        """A JSON line a step, of this launch."""
        return self.run.next_metrics

    @property
    def log(self) -> Path:
        """What the trainer prints."""
        return self.run.folder / f"logs/{self.name.lower()}-{self.metrics.stem}.log"

    def comments(self) -> str:
        """The plan as YAML comments, for the head of the config."""
        lines = {
            "start": self.start,
            "run folder": self.run.folder,
            "resumes from step": self.run.last,
            "steps": self.steps,
            "command": shlex.join(self.command),
        }
        return "\n".join(f"# {name}: {' '.join(str(value).splitlines())}" for name, value in lines.items())


def sft_plan(s: Settings, run: Run, start: str, demonstrations: Path) -> Plan:
    """The warm-up of the model ``start`` on a parquet file. Raises SettingsError."""
    ours = verl_config.sft_overrides(s, start, run.folder, demonstrations)
    program, own = _torchrun(s, "verl_tasks.verl_plugins.sft")
    own |= {"SEED": str(s.SEED), "SFT_LOSS": str(s.SFT_LOSS)}  # verl_plugins/sft.py
    return Plan(
        name="SFT",
        settings=s,
        start=start,
        run=run,
        steps=s.SFT_STEPS,
        command=[*program, *verl_config.HYDRA, *ours],
        environment=_writes(s, run) | own,
        config=verl_config.resolved("sft_trainer_engine", ours),
    )


def pairs_plan(s: Settings, run: Run, start: str, pairs: Path, number: int = 1) -> Plan:
    """Round ``number`` of DPO: STEPS on a file of pairs."""
    seed = s.TRAIN_SEED + number - 1
    program, own = _torchrun(s, "verl_tasks.training.trl_dpo")
    return Plan(
        name=s.METHOD.upper(),
        settings=replace(s, TRAIN_SEED=seed),
        start=start,
        run=run,
        steps=s.STEPS,
        command=[*program, start, str(pairs), str(run.folder)],
        environment=exported(replace(s, SEED=seed)) | _writes(s, run) | own,
    )


def rl_plan(
    s: Settings, run: Run, start: str, arguments: Sequence[str] = (), number: int = 1, anyway: bool = True
) -> Plan:
    """Round ``number`` of RL from the model ``start``; each round has other prompts and samples.

    ``arguments``: hydra's, after ours. ``anyway``: train also where no first sample is right. Raises SettingsError.
    """
    seed = s.TRAIN_SEED + number - 1
    seeded = replace(s, SEED=seed)  # for the trainer; the data keep their SEED
    # verl has no keys for these.
    own = {"SEED": str(seed), "KEEP": str(s.KEEP), "PATIENCE": str(s.PATIENCE), "ANYWAY": str(int(anyway))}
    given = exported(seeded)
    own |= _writes(s, run) | trainer_module(s, given)
    sent = verl_config.sent_environment(given | own)
    ours = [*sent, *verl_config.rl_overrides(seeded, start, run.folder)]
    launcher = getattr(stack(s.STACK), "LAUNCHER", [])
    return Plan(
        name=s.METHOD.upper(),
        settings=replace(s, TRAIN_SEED=seed),
        start=start,
        run=run,
        steps=s.STEPS,
        command=[sys.executable, "-m", *launcher, "verl.trainer.main_ppo", *verl_config.HYDRA, *ours, *arguments],
        environment=own,
        config=verl_config.resolved("ppo_trainer", ours, arguments),
        shown=REWARD,
    )


def _writes(s: Settings, run: Run) -> dict[str, str]:
    """The environment that says where metrics go."""
    return tracking.writes_to(s, run.folder) | {"VERL_FILE_LOGGER_PATH": str(run.next_metrics)}


def _torchrun(s: Settings, module: str) -> tuple[list[str], dict[str, str]]:
    """The command of ``module`` on N_GPUS, and the environment that it needs without torchrun."""
    torchrun = ["verl_tasks.training.torchrun", f"--nproc_per_node={s.N_GPUS}", "-m"] if s.N_GPUS > 1 else []
    return [sys.executable, "-m", *torchrun, module], {} if torchrun else dict(ONE_WORKER)


def trainer_module(s: Settings, given: Mapping[str, str]) -> dict[str, str]:
    """The environment in which every verl process loads the method's trainer beside those that are ``given``, where
    verl lets one choose it."""
    own = verl_config.trainer_of(s)[0] if verl_versions.has_own_trainers(s) else None
    modules = [given.get("VERL_USE_EXTERNAL_MODULES"), own]
    return {"VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules))}
