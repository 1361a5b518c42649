"""DPO (Rafailov et al. 2023, arXiv 2305.18290): learn from pairs of a better and a worse response, without rollouts.

verl has no DPO: training/trl_dpo.py trains with TRL, on the pairs of PAIRS_FILE or of the policy's own samples.
"""

from tasks.common.settings import Settings

DEFAULTS = {"KL_COEF": "0"}  # in rounds of self-play too: its pull to the start is DPO_BETA


def sharded(s: Settings) -> bool:
    """Whether each of several GPUs has a share of the policy, its optimizer and the reference (FSDP2), in place of all.

    Not on a CPU, where accelerate has no FSDP; and not with LoRA, where TRL's FSDP has not been tried.
    """
    return not s.LORA_RANK and s.STACK != "cpu"
