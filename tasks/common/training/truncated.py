"""TRUNCATED: what a response that was cut off at MAX_RESPONSE_LENGTH does in training."""

from tasks.common.settings import Settings, SettingsError

BUFFER = 5  # the penalty grows over the last fifth of MAX_RESPONSE_LENGTH; the DAPO paper: 4,096 of 20,480 tokens
AGENT_LOOPS = {"masked": "single_turn_unless_truncated"}  # tasks/common/verl_plugins/agent_loops.yaml


def check(s: Settings) -> None:
    """Raise SettingsError where TRUNCATED would do nothing."""
    if s.TRUNCATED == "counted":
        return
    if s.METHOD == "dpo":
        raise SettingsError(f"TRUNCATED={s.TRUNCATED}: is for the RL methods; METHOD=dpo learns from pairs")
    if s.TRUNCATED == "shaped" and (s.METHOD == "distill" or s.REWARD_MODEL):
        what = "METHOD=distill learns from no reward" if s.METHOD == "distill" else "REWARD_MODEL is the whole reward"
        raise SettingsError(f"TRUNCATED=shaped: {what}; take TRUNCATED=masked or counted")


def overrides(s: Settings) -> list[str]:
    """What TRUNCATED sets in verl's config.

    masked: no token of such a response counts in a loss. shaped: verl's soft overlong punishment (Yu et al. 2025,
    arXiv 2503.14476, equation 13), from 0 at the start of the buffer to -1 at MAX_RESPONSE_LENGTH.
    """
    loop = AGENT_LOOPS.get(s.TRUNCATED, "single_turn_of_row")
    chosen = [f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}"]
    if s.TRUNCATED != "shaped":
        return chosen
    buffer = "+reward.reward_kwargs.overlong_buffer_cfg"
    return [
        *chosen,
        "reward.reward_manager.name=dapo",
        f"+reward.reward_kwargs.max_resp_len={s.MAX_RESPONSE_LENGTH}",
        f"{buffer}.enable=True",
        f"{buffer}.len={max(1, s.MAX_RESPONSE_LENGTH // BUFFER)}",
        f"{buffer}.penalty_factor=1.0",
        f"{buffer}.log=False",  # the metric would be a tensor, which the file of metrics does not take
    ]
