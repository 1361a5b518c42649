{% macro line(name, default, comment, cpu="") %}
{{ ("default %s %s%s" % (name, default, " cpu=%s" % cpu if cpu else "")).ljust(47) }} # {{ comment }}
{%- endmacro %}
{% set multi = cookiecutter.turns != "single" %}
{% set generated = cookiecutter.source == "generate" %}
{% set pass_tokens = {"ppo": 1536, "distill": 2048}.get(cookiecutter.method, 4096) %}
{% set small = {"tool_call": (256, 64)}.get(cookiecutter.reward, (128, 64)) %}
{% if cookiecutter.source == "reasoning_gym" %}
{% set small = cookiecutter.env | lengths(cookiecutter.config) %}
{% endif %}
{## One long sequence takes more of 16 GB than short ones: longer prompts are left out, longer answers cut off. ##}
{% set longest = [pass_tokens, 3072] | min %}
{% set answer = [small[1] or 256, longest * 3 // 4] | min %}
{% set prompt = [small[0], longest - answer] | min %}
#!/usr/bin/env bash
# {{ cookiecutter.description }}.
# Any variable can be given: make train TASK={{ cookiecutter.task }} LR=2e-6 ARGS="trainer.total_epochs=1". All of them: make settings.
default() { :; } # make reads these lines

{{ line("MODEL", cookiecutter.model, "a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)", "embedded") }}
{% if not small[1] or cookiecutter.source in ("verifiers", "openenv") %}
{{ line("INIT", "base", "the environment gives no worked answers for an SFT warm-up") }}
{% endif %}
{{ line("SOURCE", cookiecutter.source, "hub, or a local folder of its form" if cookiecutter.source == "hub" else "a name that prepare_data.py knows") }}
{% if cookiecutter.source == "file" %}
{{ line("FILE", '"$ROOT/tasks/' ~ cookiecutter.task ~ '/data.jsonl"', "a data file, or a folder with train.* and test.*") }}
{% endif %}
{% if cookiecutter.source in ("hub", "file") %}
{{ line("TRAIN_SIZE", 0, "0: all", 512) }}
{{ line("TEST_SIZE", "0.1" if cookiecutter.source == "file" else 512, "a count, a share below 1, or 0: all of a test split", 128) }}
{% else %}
{{ line("TRAIN_SIZE", 8192, "training prompts", 512) }}
{{ line("TEST_SIZE", 512, "held-out prompts", 64 if multi else 128) }}
{% endif %}
{{ line("METHOD", cookiecutter.method, "docs/METHODS.md has all of them") }}
{% if multi and cookiecutter.method == "dapo" %}
{{ line("TRUNCATED", "masked", "no loss of a cut-off episode; dapo's penalty is for single responses") }}
{% endif %}
{{ line("STEPS", 100, "training steps", 12 if multi and generated else 8) }}
{% if cookiecutter.lora == "yes" %}
{{ line("LORA_RANK", 8, "an adapter; 0: full fine-tuning") }}
{{ line("LORA_ALPHA", 16, "LoRA scale") }}
{{ line("LR", "1e-6", "times 10 for the adapter", "2e-5") }}
{{ line("SFT_STEPS", 64, "steps of the warm-up", 12) }}
{{ line("SFT_LR", "1e-5", "in the warm-up, times 10 for the adapter", "2e-4") }}
{% endif %}
{% if cookiecutter.gpus != "all" %}
{{ line("N_GPUS", cookiecutter.gpus, "of this machine", 1) }}
{% endif %}
{% if multi %}
{% if generated and cookiecutter.lora != "yes" %}
{{ line("SFT_STEPS", 64, "most steps of the warm-up", 32) }}
{{ line("SFT_LOSS", 0, "nats of a whole demonstration that end it before: RL is to learn the rest", "2.5") }}
{{ line("SFT_BATCH_SIZE", 64, "demonstrations a step", 8) }}
{{ line("SFT_LR", "1e-5", "in the warm-up; a smaller batch takes a lower one", "1.5e-4") }}
{% endif %}
{{ line("TRAIN_BATCH_SIZE", 32 if cookiecutter.method == "dpo" else 128, "prompts a step; each is sampled ROLLOUT_N times", 8 if generated else 4) }}
{{ line("MAX_TURNS", 4, "of the model in an episode") }}
{{ line("MAX_TURN_LENGTH", 256, "tokens", 64) }}
{{ line("MICRO_BATCH_SIZE", 16, "long episodes: fewer sequences in one pass", [8, pass_tokens // 448] | min) }}
{{ line("MAX_PROMPT_LENGTH", 512, "tokens", 256) }}
{{ line("MAX_RESPONSE_LENGTH", 1024, "tokens of all turns and results", 192) }}
{% else %}
{{ line("MAX_PROMPT_LENGTH", 256 if generated and cookiecutter.reward != "tool_call" else [1024, 2 * small[0]] | max, "tokens", prompt) }}
{{ line("MAX_RESPONSE_LENGTH", 1024, "tokens", answer) }}
{% set fitting = pass_tokens // (prompt + answer) %}
{% if fitting < 16 %}
{{ line("MICRO_BATCH_SIZE", 16, "sequences in one pass; on a CPU fewer long ones fit in 16 GB", fitting) }}
{% endif %}
{% endif %}

cd "$(dirname "$0")" && exec make --no-print-directory -C ../.. "${STAGE:-train}" TASK="${PWD##*/}" ARGS="${*@Q}"
