# Rollouts come from vLLM's process as whole responses; not of vLLM 0.11.0.
WHOLE_RESPONSES = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=verl_tasks.verl_plugins.whole_responses.WholeResponses"
)
