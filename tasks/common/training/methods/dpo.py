"""DPO (Rafailov et al. 2023, arXiv 2305.18290): learn from pairs of a better and a worse response, without rollouts.

verl has no DPO: training/trl_dpo.py trains with TRL, on the pairs of PAIRS_FILE or of the policy's own samples.
"""
