"""`make rehearse`: the run that is meant for GPUs, played on this CPU with a thin model, and what would break it.

Settings are those of the real run, with the defaults of its stack. What is played are the ordinary targets, each as a
user types it, with ARTIFACTS in a folder of their own; a thin model (models/thin.py) stands for the real one, another
for a teacher, and a server for a judge. What would break the real run, and the memory that it needs: launch/needs.py.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from verl_tasks.data.pairs import pairs_columns
from verl_tasks.guarded import asks_judge
from verl_tasks.launch import needs, stand_ins
from verl_tasks.launch.task import load_reward
from verl_tasks.models import thin
from verl_tasks.rows import DataError
from verl_tasks.settings import (
    COMPLETE,
    ROOT,
    Command,
    Settings,
    SettingsError,
    artifacts,
    load_settings,
    unread,
    values_of,
)

STEPS, SAVED, SFT_STEPS = "2", 1, 2  # RL steps, the one whose checkpoint is resumed, steps of the warm-up
ROWS, TEST, DEV, EVALUATED = 512, 16, 4, 4  # at most: training, test and dev prompts, prompts of the evaluation
BATCH, ROLLOUTS, SAMPLES = 4, 4, 2
PAIRS_BATCH, PAIRS = 2, 16  # of DPO: pairs of a step, and of PAIRS_FILE
KNOWN = range(BATCH, 2 * BATCH + 1)  # training prompts whose demonstrations the thin model learns
LEARNED = 0.1  # the least probability of a demonstration at which a few samples of each prompt differ
RESPONSE, EPISODE, TURN = 128, 256, 128  # tokens; a random model hardly ever ends a response
KILL_AFTER = 900  # seconds without a checkpoint
CLEAN_SECONDS = 20  # until no process of a killed training is left
POLL_SECONDS = 0.2
# Of the real run's settings, these say what a CPU with one process and a random model cannot play.
ALONE = {
    "N_GPUS": "1",
    "ROLLOUT_GPUS": "0",
    "NNODES": "1",
    "TP": "1",
    "SP": "1",
    "OFFLOAD": "0",
    "MAX_TOKENS_PER_GPU": "0",
}
NOT_PLAYED = ("ABORT_ON", "WANDB", "LOGGER", "REWARD_MODEL", "RUN", "PATIENCE")
# What make, a shell and an outer launch put into the environment; a played command gets its own.
OURS = {"GIVEN", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "STARTED", COMPLETE, "ARTIFACTS", "ARGS", "RAY_ADDRESS", "PYTHON"}


@dataclass
class Played:
    """How a stage went: ``problem`` is its error line, empty where it held."""

    name: str
    seconds: float
    said: str
    problem: str = ""
    log: str = ""


@dataclass
class Rehearsal:
    """What is rehearsed, where, and what came of it. ``given``: the variables of the played commands."""

    real: Settings
    folder: Path
    given: dict[str, str]
    arguments: str
    judge: str = ""  # its URL, where the reward asks one
    logs: int = 0  # of the stages so far

    @property
    def data_dir(self) -> Path:
        return self.folder / "data" / self.real.TASK

    def command(self, goal: str) -> list[str]:
        """What a user would type."""
        values = self.given | ({"ARGS": self.arguments} if self.arguments else {})
        return ["make", goal, f"PYTHON={sys.executable}", *(f"{name}={value}" for name, value in values.items())]

    def environment(self) -> dict[str, str]:
        known = {*Settings.__dataclass_fields__, *Command.__dataclass_fields__, *OURS}
        kept = {n: v for n, v in os.environ.items() if n not in known and not n.startswith("JUDGE_")}
        return kept | ({"JUDGE_URL": self.judge, "JUDGE_MODEL": "played"} if self.judge else {})


# ---- settings ------------------------------------------------------------------------------------------------------


def real_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the real run: what is given, with its stack. Without GPUs here, N_GPUS is 1 unless it is
    given. Raises SettingsError."""
    given = dict(environ) | {"STACK": environ.get("REHEARSED") or environ.get("STACK", ""), "STAGE": "train"}
    return given | ({"N_GPUS": "1"} if values_of(given)["N_GPUS"].text == "0" else {})


def smaller(s: Settings) -> dict[str, str]:
    """What of the real settings is played otherwise: sizes, lengths, and what one CPU or a random model cannot do."""
    rows, dpo = max(ROWS, s.TRAIN_BATCH_SIZE) if not s.by_pairs else ROWS, s.by_pairs
    batch, response = PAIRS_BATCH if dpo else BATCH, EPISODE if s.multi_turn else RESPONSE
    sizes = {
        "TRAIN_SIZE": min(s.TRAIN_SIZE or rows, rows),
        "DEV_SIZE": min(s.DEV_SIZE, DEV),
        "SFT_SIZE": min(s.SFT_SIZE, ROWS),
        "SAMPLED_PROMPTS": KNOWN[-1],
        "TRAIN_BATCH_SIZE": batch,
        "MINI_BATCH_SIZE": batch if s.MINI_BATCH_SIZE == s.TRAIN_BATCH_SIZE else batch // 2,
        "MICRO_BATCH_SIZE": 2,
        "ROLLOUT_N": min(s.ROLLOUT_N, 2 * ROLLOUTS if dpo else ROLLOUTS),
        "DPO_EPOCHS": 2,  # few pairs, and two steps for a kill between them
        "STEPS": STEPS,
        "SELF_PLAY_ROUNDS": 1,
        "CRITIC_WARMUP": min(s.CRITIC_WARMUP, 1),
        "LR_WARMUP": min(s.LR_WARMUP, 0 if s.METHOD == "ppo" and s.CRITIC_WARMUP else 1),
        "SFT_STEPS": SFT_STEPS,
        "SFT_BATCH_SIZE": BATCH,
        "SFT_SOURCE": "task",  # samples of the thin model may be too few
        "SAVE_FREQ": SAVED,
        "TEST_FREQ": 1 if s.TEST_FREQ else 0,
        "MAX_RESPONSE_LENGTH": min(s.MAX_RESPONSE_LENGTH, response),
        "MAX_NEW_TOKENS": min(s.MAX_NEW_TOKENS, response),
        "N": min(s.N, SAMPLES),
        "LIMIT": EVALUATED,
    }
    sizes |= {"TEST_SIZE": f"{min(s.TEST_SIZE, TEST):g}" if s.TEST_SIZE >= 1 else f"{s.TEST_SIZE:g}"}
    sizes |= {"MAX_TURN_LENGTH": min(s.MAX_TURN_LENGTH, TURN, sizes["MAX_RESPONSE_LENGTH"])}
    sizes |= {"ASYNC": "colocate"} if s.sampling_gpus else {}
    return ALONE | {name: str(value) for name, value in sizes.items()}


def given_variables(s: Settings, texts: Mapping[str, str], model: Path, folder: Path) -> dict[str, str]:
    """The variables of a played command: those of which the cpu stack's defaults are not what is wanted.

    ``texts``: the settings ``s`` as they were written."""
    played = dict(texts) | smaller(s)
    played |= {"MODEL": str(model), "STACK": "cpu"} | ({"TEACHER": str(folder / "teacher")} if s.TEACHER else {})
    for name in {*NOT_PLAYED, *unread(s)}:
        played.pop(name)
    given = {"TASK": s.TASK, "STACK": "cpu"}
    while True:  # one value may change the defaults of others
        found = values_of(given)
        more = {name: value for name, value in played.items() if value and found[name].text != value}
        if not more:
            return given | {"ARTIFACTS": str(folder)}
        given |= more


def not_played(s: Settings) -> str:
    """The real run's settings that stay unplayed, in words; empty where there are none."""
    named = [name for name in (*ALONE, *NOT_PLAYED) if name not in ("MAX_TOKENS_PER_GPU", "RUN")]
    default = {name: f.metadata["default"] for name, f in Settings.__dataclass_fields__.items()} | {"N_GPUS": "1"}
    values = {name: str(getattr(s, name)) for name in named if str(getattr(s, name)) != default[name]}
    values |= {"ASYNC": s.ASYNC} if s.sampling_gpus else {}
    values |= {"SFT_SOURCE": "samples"} if s.INIT == "sft" and s.SFT_SOURCE == "samples" else {}
    values |= {"SELF_PLAY_ROUNDS": str(s.SELF_PLAY_ROUNDS)} if s.SELF_PLAY_ROUNDS > 1 else {}
    return ", ".join(f"{name}={value}" for name, value in values.items())


# ---- stages --------------------------------------------------------------------------------------------------------


def play(r: Rehearsal, name: str, goal: str = "", until: Callable[[], bool] | None = None) -> Played:
    """Run a target, by default ``name``; its output goes to a log. ``until``: once this holds, its whole group gets
    SIGKILL; it is an error that it never does."""
    r.logs += 1
    log = r.folder / f"logs/{r.logs:02d}-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command, started, killed = r.command(goal or name), time.monotonic(), False
    with log.open("w") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=r.environment(), **how)
        try:
            while process.poll() is None and not (until and time.monotonic() - started > KILL_AFTER):
                if until and until():
                    killed = True
                    os.killpg(process.pid, signal.SIGKILL)
                    break
                time.sleep(POLL_SECONDS)
        finally:
            _end(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    *_, last = (line for line in lines if not line.startswith("make"))
    played = Played(name, time.monotonic() - started, last.strip(), log=str(log))
    if not killed and (until or process.returncode):
        ended = "it made no checkpoint that a kill could follow" if until else f"exit code {process.returncode}: {last}"
        played.problem = next((line for line in lines if line.startswith("error: ")), ended)
    return played


def _end(process: subprocess.Popen) -> None:
    """End a command in order, as Ctrl-C would, unless it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _left(folder: Path) -> list[str]:
    """The processes that work in ``folder``, after at most CLEAN_SECONDS."""
    until = time.monotonic() + CLEAN_SECONDS
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and str(folder) in " ".join(process.cmdline()):
                    found.append(f"{process.pid} {process.name()}")
        if not found or time.monotonic() > until:
            return found
        time.sleep(POLL_SECONDS)


def stages(r: Rehearsal) -> Iterator[Played]:
    """Play the stages, one after the other, until one breaks; no other needs certify."""
    own = {"teach": teach, "train": killed, "resume": resumed}
    names = ["data", "teach", "certify", "sft", "train", "resume", "merge", "report"]
    left_out = {"certify"} if r.real.by_pairs else set()  # it samples nothing in training
    left_out |= {"sft"} if r.real.INIT != "sft" else set()
    for name in names:
        if name not in left_out:
            yield (played := own[name](r) if name in own else play(r, name))
            if played.problem and name != "certify":
                return


def killed(r: Rehearsal) -> Played:
    """The training, killed once it has a checkpoint; it may leave no process behind."""

    def saved() -> bool:
        return any(r.folder.glob(f"runs/{r.real.TASK}/{r.real.METHOD}-*/checkpoints/latest_checkpointed_iteration.txt"))

    played = play(r, "train", until=saved)
    played.said = "SIGKILL once it had a checkpoint"
    if not played.problem and (left := _left(r.folder)):
        played.problem = f"{len(left)} processes outlived the kill: {', '.join(left[:5])}"
    return played


def resumed(r: Rehearsal) -> Played:
    """The same training to its end, with the evaluation."""
    played = play(r, "resume", "train")
    played.said = "to the last step, and evaluated"
    if not played.problem and "resuming from step" not in Path(played.log).read_text(errors="replace"):
        played.problem = "it began anew, not from the checkpoint"
    return played


def teach(r: Rehearsal) -> Played:
    """Teach the thin model some demonstrations and train on their prompts, so that rewards differ; of PAIRS_FILE take
    the first pairs. Without demonstrations the model stays as it is, with random weights."""
    s, started, problem, said = r.real, time.monotonic(), "", ""
    try:
        if s.by_pairs and s.PAIRS_FILE:
            r.given["PAIRS_FILE"] = str(r.folder / "pairs.parquet")
            count = stand_ins.first_pairs(s.PAIRS_FILE, Path(r.given["PAIRS_FILE"]), PAIRS, pairs_columns(s))
            said = f"the first {count} pairs of PAIRS_FILE; random weights"
        else:
            played = load_settings({name: value for name, value in r.given.items() if name != "ARTIFACTS"})
            files = needs.train_file(s, r.data_dir), r.data_dir / "sft.parquet", Path(played.MODEL)
            count, chance = stand_ins.taught(played, *files, r.folder / "known.parquet", KNOWN)
            said = f"no {KNOWN[0]} demonstrations fit the limits: random weights, whose rewards hardly differ"
            if count:
                r.given["TRAIN_FILE"] = str(r.folder / "known.parquet")
                verb = "learned" if chance >= LEARNED else "did not learn its"
                said = f"the thin model {verb} {count} demonstrations; it samples one with probability {chance:.2f}"
            if s.by_pairs and chance < LEARNED:
                problem = f"METHOD=dpo finds no pairs among own samples: {said}; give PAIRS_FILE"
    except (DataError, ValueError, SettingsError) as error:
        problem = str(error)
    return Played("teach", time.monotonic() - started, said, problem)


# ---- the command ---------------------------------------------------------------------------------------------------


def tell(played: Played) -> None:
    state = f"error: {played.problem}\n{'':10}log: {played.log}" if played.problem else played.said
    print(f"  {played.name:<8}{played.seconds:4.0f} s  {state}", flush=True)


def composed(real: Settings, folder: Path) -> Settings:
    """``real`` for the verl that is installed here, the cpu stack's, with the thin models of ``folder``, which have
    weights. `a100` has another verl, whose keys it lacks; `current` sets the same of what RL's memory depends on."""
    teacher, stack = str(folder / "teacher") if real.TEACHER else "", real.STACK
    return replace(real, MODEL=str(folder / "model"), TEACHER=teacher, STACK="current" if stack == "a100" else stack)


def main(arguments: list[str]) -> None:
    """Exits with 1 when a stage broke, or when something would break the real run; before anything is played where
    that shows already. Raises SettingsError."""
    given = real_environment(os.environ)
    real, command = load_settings(given), load_settings(cls=Command)
    judged, target = asks_judge(load_reward(real)), needs.target_of(real, command)
    folder, started = artifacts() / "rehearse" / real.TASK, time.monotonic()
    sources = {"MODEL": thin.config_folder(real.MODEL)}
    sources |= {"TEACHER": thin.config_folder(real.TEACHER, "TEACHER")} if real.TEACHER else {}
    print(f"the real run: TASK={real.TASK} METHOD={real.METHOD} MODEL={real.MODEL} STACK={real.STACK}, {target}")
    shutil.rmtree(folder, ignore_errors=True)
    for seed, (name, source) in enumerate(sources.items(), real.SEED):
        parameters = thin.write(source, folder / name.lower(), seed)
        print(f"a thin {name} of {parameters / 1e6:.1f} M parameters, by config.json and tokenizer of {source}")
    here = replace(real, **{name: str(source) for name, source in sources.items()})
    found = needs.before(here, composed(real, folder), arguments, target, command)
    found += [needs.judge()] if judged else []
    played = []
    if not any(finding.state == "error" for finding in found):
        print("played on this CPU; its steps:")
        if words := not_played(real):
            print(f"  not played: {words}")
        texts = {name: value.text for name, value in values_of(given).items()}
        r = Rehearsal(real, folder, given_variables(real, texts, folder / "model", folder), shlex.join(arguments))
        with stand_ins.judge() if judged else contextlib.nullcontext("") as r.judge:
            for each in stages(r):
                played.append(each)
                tell(each)
        found += needs.of_data(here, r.data_dir)
    print("\nWhat the real run needs, and what would break it:")
    for finding in found:
        print(f"  {finding.state:<8} {finding}")
    broke, wrong = sum(bool(each.problem) for each in played), sum(finding.state == "error" for finding in found)
    said = (
        f"{len(played)} stages in {time.monotonic() - started:.0f} s, {broke} broke" if played else "nothing was played"
    )
    print(f"\n{said}; {wrong} error{'' if wrong == 1 else 's'} of the real run")
    if broke or wrong:
        sys.exit(1)
