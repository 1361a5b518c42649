# Rollouts come from vLLM's process as whole responses; not of vLLM 0.11.0.
WHOLE_RESPONSES = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=verl_tasks.verl_plugins.whole_responses.WholeResponses"
)

# Passes of PATHS (training/parity.py) without packing, which every stack of verl 0.9.1 has.
PADDED = {
    "padded, sdpa": {"attention": "sdpa", "packed": False, "fused": False},
    "padded, eager": {"attention": "eager", "packed": False, "fused": False},
}
