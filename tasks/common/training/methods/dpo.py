"""DPO (Rafailov et al. 2023, arXiv 2305.18290): learn from pairs of a better and a worse response, without rollouts.

verl has no DPO: training/trl_dpo.py trains with TRL, on the pairs of PAIRS_FILE or of the policy's own samples.
"""

from collections.abc import Iterator
from pathlib import Path

from verl_tasks.settings import Settings

DEFAULTS = {"KL_COEF": "0"}  # in rounds of self-play too: its pull to the start is DPO_BETA
BATCH_SIZE = 32  # pairs
PAIRS, REWARD, EPISODES, ASYNC = True, False, False, False
MANY_EPOCHS = 3


def refusals(s: Settings) -> Iterator[str]:
    """Why DPO cannot train with these settings."""
    if s.PAIRS_FILE and s.SELF_PLAY_ROUNDS > 1:
        yield "PAIRS_FILE: holds samples of another policy; leave it out with SELF_PLAY_ROUNDS"
    if others := [name for name in s.ABORT_ON.split(",") if name not in ("", "nan")]:
        yield f"ABORT_ON={s.ABORT_ON}: of METHOD=dpo only nan can be seen; leave {others[0]} out"
    if s.TRAIN_BATCH_SIZE % s.N_GPUS:
        yield f"N_GPUS={s.N_GPUS}: must divide TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}"
    for name, given, why in (
        ("SP", s.SP > 1, "trains on whole sequences"),
        ("OFFLOAD", s.OFFLOAD, "does not sample while it trains"),
        ("NNODES", s.NNODES > 1, "trains on one machine"),
        ("PATIENCE", s.PATIENCE, "has no validations"),
        ("TRUNCATED", s.TRUNCATED != "counted", "learns from pairs"),
        ("REWARD_MODEL", s.REWARD_MODEL, "learns from pairs"),
    ):
        if given:
            yield f"{name}={getattr(s, name)}: is for the RL methods; METHOD=dpo {why}; leave {name} out"


def problem(s: Settings) -> str | None:
    """Why it cannot train on what is there."""
    missing = s.PAIRS_FILE and not Path(s.PAIRS_FILE).expanduser().is_file()
    return f"PAIRS_FILE={s.PAIRS_FILE}: no such file" if missing else None


def warning(s: Settings) -> str | None:
    """What to know before a training."""
    if s.DPO_EPOCHS <= MANY_EPOCHS:
        return None
    many = f"more than {MANY_EPOCHS} epochs over the same pairs usually overfit"
    return f"DPO_EPOCHS={s.DPO_EPOCHS}: {many}; watch val/accuracy, or set SELF_PLAY_ROUNDS"


def sharded(s: Settings) -> bool:
    """Whether each of several GPUs has a share of the policy, its optimizer and the reference (FSDP2), in place of all.

    Not on a CPU, where accelerate has no FSDP; and not with LoRA, where TRL's FSDP has not been tried.
    """
    return not s.LORA_RANK and s.STACK != "cpu"
