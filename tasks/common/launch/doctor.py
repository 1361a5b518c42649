"""`make doctor`: check this machine, the settings and the data, and say what to do about each problem.

The same checks run before every training; there only warnings and errors are printed, and an error ends the command.
All checks together take less than 20 seconds: nothing imports verl or vLLM, and the task's large data is sampled.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from itertools import chain, islice
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from verl_tasks import __version__
from verl_tasks.data import gold
from verl_tasks.data.held_out import check_held_out
from verl_tasks.data.prepare import load_tokenizer, read_manifest
from verl_tasks.files import read_json
from verl_tasks.install.check import installed
from verl_tasks.launch import memory_checks
from verl_tasks.launch.finding import Finding, error, ok, warning
from verl_tasks.launch.memory_checks import ALONE, Jobs, batches_and_memory, jobs_of, of_each_method
from verl_tasks.launch.task import load_reward
from verl_tasks.machine import cluster, hardware, memory
from verl_tasks.machine.memory import gb
from verl_tasks.models.chat_template import answer_ids, demonstration_ids, prompt_ids
from verl_tasks.models.find import embedded_folder, resolve_model, weights_bytes
from verl_tasks.models.merge import base_model, is_adapter
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.examples import check_examples
from verl_tasks.rows import DataError, decoded, read_rows, tools_of, validate_parquet
from verl_tasks.runs import folder, launches, library
from verl_tasks.settings import Settings, SettingsError, code_digest, teacher_gpus
from verl_tasks.stages import stage_of
from verl_tasks.text import one_line, show
from verl_tasks.training import parity, verl_config, verl_versions

ROWS = 20_000  # checked of each data file, but all of TRAIN_FILE
PROMPTS = 2_000  # measured in tokens, spread over the file
PROMPT_SECONDS = 3.0
TOKENIZER_BY = 6.0  # seconds; later the tokenizer is not loaded: its import may take 14 s on a busy machine
SHARED_MEMORY = 2e9  # with less, Ray's object store goes to disk, and NCCL and data workers may not start
PINNED = ("verl", "torch", "vllm", "transformers", "ray", "tensordict")  # a wrong version of another is a warning
# Families whose output layers peft refuses (peft/tuners/tuners_utils.py, _check_lora_target_modules_mamba).
WITHOUT_LORA = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
COMPILED = ("torch", "transformers", "vllm", "verl")  # the largest imports


# ---- the machine ---------------------------------------------------------------------------------------------------


def of_machine(
    s: Settings, found: hardware.Nvidia | None, runs: Sequence[Settings] = (), jobs: Jobs = ALONE
) -> Iterator[Finding]:
    """Processor, RAM and GPUs. ``found``: by nvidia-smi; None on the cpu stack, or without a driver. ``runs``: the
    trainings of an experiment, ``jobs`` of them at a time."""
    free, total = hardware.ram()
    held = f"; a training holds {cluster.held_cpus(s)} CPUs of its Ray, which may be more than there are cores"
    yield ok("cpu", f"{os.cpu_count()} cores, {gb(free)} of {gb(total)} RAM free{held}")
    if s.STACK == "cpu":
        return
    if found is None or not found.gpus:
        if os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):
            yield ok("gpu", "none in this machine; those of the cluster are not checked")
        elif found and (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            yield error("gpu", f"CUDA_VISIBLE_DEVICES={one_line(named, 80)}: names no GPU here", "correct it")
        else:
            yield error("gpu", "nvidia-smi finds no GPU", "install NVIDIA's driver, or set STACK=cpu")
        return
    names = ", ".join(sorted({gpu.name for gpu in found.gpus}))
    free_now = ", ".join(gb(gpu.free) if gpu.total else "unknown" for gpu in found.gpus)
    yield ok("gpu", f"driver {found.driver}, CUDA {found.cuda}, {len(found.gpus)} x {names}, free {free_now}")
    others = teacher_gpus(runs or [s])
    if len(found.gpus) < s.N_GPUS + others:
        wanted, there = f"{s.N_GPUS}{f' and {others} for TEACHER' if others else ''}", len(found.gpus)
        fix = memory_checks.fewer_gpus(of_each_method(s, runs), there - others)
        yield error("gpu", f"N_GPUS={wanted}, and there are {there}", fix)
    for number, gpu in jobs.gpus(s, found.gpus).items():
        if not gpu.processes:
            continue
        named = ", ".join(f"{pid} {Path(name).name} ({gb(size)})" for pid, name, size in gpu.processes[:4])
        ours = [str(pid) for pid, _, _ in gpu.processes if hardware.own_process(pid)]
        fix = f"kill {' '.join(ours)}" if ours else "wait for them, or choose other GPUs with CUDA_VISIBLE_DEVICES"
        yield warning("gpu", f"other processes are on GPU {number}: {named}", fix)


def disk(s: Settings, sizes: list[float]) -> Iterator[Finding]:
    """Room for checkpoints of ``sizes`` bytes, and Ray's and NCCL's shared memory."""
    existing, free = hardware.free_disk(s.runs_dir)
    if free < (need := sum(sizes)):
        short = f"{existing}: {gb(free)} free, {len(sizes)} checkpoints need about {gb(need)}"
        yield error("disk", short, "free some space, or set ARTIFACTS to a folder on a larger disk")
    else:
        yield ok("disk", f"{existing}: {gb(free)} free" + (f", checkpoints need about {gb(need)}" if need else ""))
    shared = hardware.free_disk(Path("/dev/shm"))[1]
    found = "shared memory", f"/dev/shm: {gb(shared)} free"
    yield ok(*found) if shared >= SHARED_MEMORY else warning(*found, "in a container: docker run --shm-size=16g")


def checkpoint_sizes(
    s: Settings,
    runs: Sequence[Settings] = (),
    jobs: int = 1,
    arguments: Sequence[str] = (),
    continued: bool = False,
) -> list[float]:
    """Bytes of each checkpoint that will be there at once: the warm-up's, of each round the best and the last, and
    those being written; none where MODEL's size is not known. ``runs``: the trainings of an experiment, ``jobs`` at a
    time, with ``arguments``; where they may be ``continued``, those that they have made do not count."""
    shapes = memory.shapes_of(base_model(s.MODEL))
    # An unknown model type is assumed to be bf16.
    if not (parameters := shapes.parameters if shapes else weights_bytes(s.MODEL) // 2):
        return []
    warm_up = "sft" in memory_checks.stages(s, "train")  # where it is there already, no room is needed
    contents = {run.METHOD: verl_config.save_contents(run, arguments) for run in of_each_method(s, runs)}

    def size_of(run: Settings, policy: Sequence[str], critic: Sequence[str]) -> float:
        adapter = (shapes.adapter(run.LORA_RANK) if shapes else 1) if run.LORA_RANK else 0
        return memory.checkpoint_bytes(parameters, policy, adapter, not verl_versions.has_own_trainers(run), critic)

    sizes, largest = [size_of(s, verl_config.save_contents(s, ())[0], ())] * warm_up, 0.0  # it takes no ARGS
    for run in runs or [s]:
        policy, critic = contents[run.METHOD]
        size = size_of(run, policy, critic if run.METHOD == "ppo" else ())
        begun = folder.rounds(run, list(arguments)) if continued else []
        made = sum(len(each.steps) for each in begun)
        saved = {run.STEPS, *range(0, run.STEPS, run.SAVE_FREQ), *range(0, run.STEPS, run.TEST_FREQ or run.STEPS)} - {0}
        written = len(saved) + (min(saved) > 1)  # and the first within minutes (runs/checkpoint.py)
        kept = min(written, run.KEEP + 1)
        sizes += [size] * (run.SELF_PLAY_ROUNDS * kept - made)
        largest = max(largest, size * (written > kept))
    return sizes + [largest] * (min(jobs, len(runs) or 1) if largest else 0)


def ray() -> Iterator[Finding]:
    """The cluster that RAY_ADDRESS names, and Ray daemons that no run owns."""
    address, running = os.environ.get("RAY_ADDRESS", ""), hardware.ray_daemons()
    left = [daemon for daemon in running if daemon.orphaned]
    if address == "auto":
        missing = error("ray", "RAY_ADDRESS=auto: no Ray runs here", "run `ray start --head`, or unset it")
        yield ok("ray", "RAY_ADDRESS=auto: a Ray runs here") if running else missing
        return
    if address not in ("", "local"):
        place = address.removeprefix("ray://")
        if not hardware.listens(place):
            yield error("ray", f"RAY_ADDRESS={address}: nothing answers", "run `ray start --head` there, or unset it")
            return
        yield ok("ray", f"RAY_ADDRESS={address} answers")
        left = [daemon for daemon in left if daemon.address != place]
    if left:
        names, places = [f"{daemon.name} {daemon.pid}" for daemon in left], {daemon.address for daemon in left}
        what = ", ".join([*names, *sorted(places - {""})])
        fix = "`ray stop` ends it; to train on it set RAY_ADDRESS"
        yield warning("ray", f"a Ray without a run still takes memory ({what})", fix)
    elif not address:
        yield ok("ray", "no other Ray of yours; verl takes free ports")


def judge() -> Iterator[Finding]:
    """The server at JUDGE_URL (tasks/common/rewards/judge.py), if it is set."""
    url = urlsplit(os.environ.get("JUDGE_URL", ""))
    if url.hostname:
        place = f"{url.hostname}:{url.port or (443 if url.scheme == 'https' else 80)}"  # not the URL: it may hold a key
        missing = warning("judge", f"JUDGE_URL: nothing answers at {place}", "start its server, or correct JUDGE_URL")
        yield ok("judge", f"{place} answers") if hardware.listens(place) else missing


# ---- packages ------------------------------------------------------------------------------------------------------


def packages(s: Settings) -> Iterator[Finding]:
    """Installed versions against the stack's list."""
    every = installed(s.STACK)
    other = {p.name: f"{p.name} {p.found or 'missing'} (list: {p.wanted})" for p in every if not p.matches}
    fix = "run `make install`, without PYTHON"
    needed = [name for name in other if name.removesuffix("-cpu") in PINNED]
    if needed:
        yield error("packages", ", ".join(other[name] for name in needed), fix)
    if rest := [text for name, text in other.items() if name not in needed]:
        more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
        yield warning("packages", f"not the list's versions: {', '.join(rest[:5])}{more}", fix)
    if not other:
        core = ", ".join(f"{p.name} {p.found}" for p in every if p.name in ("verl", "torch"))
        yield ok("packages", f"STACK={s.STACK}: {len(every)} as listed ({core})")
    yield from bytecode()


def bytecode(names: Sequence[str] = COMPILED) -> Iterator[Finding]:
    """Packages without bytecode where Python writes none, as in many images: each process compiles them anew."""
    sources = [Path(spec.origin) for name in names if (spec := find_spec(name)) and spec.origin]
    bare = [each for each in sources if not Path(cache_from_source(each)).exists()]
    if stays := [p.parent for p in bare if sys.dont_write_bytecode or not os.access(p.parent, os.W_OK)]:
        text = f"{', '.join(p.name for p in stays)}: Python compiles them at each import, as it writes no bytecode"
        yield warning("packages", text, f"run `{sys.executable} -m compileall -q -j 0 {stays[0].parent}`")


def of_the_last_run(s: Settings) -> Iterator[Finding]:
    """Variables, defaults and helpers of rewards that differ from those of the version that trained the last run."""
    begun = [launch for run in folder.all_runs(s.TASK) for launch in launches.launches(run)]
    last = max(begun, key=os.path.getmtime, default=Path())
    if not isinstance(before := read_json(last / "launch.json").get("library"), dict):
        return
    by = f"{before.get('version')}, which trained {last.parents[1].name}"
    if differs := [*library.changes(before)]:
        more = f" and {len(differs) - 8} more" if len(differs) > 8 else ""
        text = f"{__version__} differs from {by}: {'; '.join(differs[:8])}{more}"
        yield warning("library", text, "CHANGELOG.md says why; give a variable its old value to keep it")
    else:
        yield ok("library", f"{__version__}, with the variables and helpers of {by}")


# ---- data and reward -----------------------------------------------------------------------------------------------


def data(s: Settings, training: bool) -> Iterator[Finding]:
    """The data files that exist, and their gold check. ``training``: a training is about to make the others."""
    manifest, sound = s.made(), True
    if not manifest:
        text = f"{s.data_dir}: {'made with other settings' if read_manifest(s.data_dir) else 'not there yet'}"
        makes = f"`make data TASK={s.TASK}` or `make train TASK={s.TASK}` makes it"
        yield ok("data", text) if training else warning("data", text, makes)
        if not s.TRAIN_FILE:
            return
    fix = f"remove {s.data_dir} and run `make data TASK={s.TASK}`"
    files = {name: s.data_dir / f"{name}.parquet" for name in manifest.get("rows", {})}
    files |= {"train": s.train_file} if s.TRAIN_FILE else {}
    for name, file in files.items():
        own = s.TRAIN_FILE and name == "train"
        try:
            if not file.is_file():
                raise DataError(f"{file}: no such file")
            validate_parquet(file, "sft" if name == "sft" else "rl", most=None if own and not training else ROWS)
            rows = pq.read_metadata(file).num_rows
        except (DataError, OSError, pa.ArrowException) as problem:
            sound = False
            yield error("data", one_line(str(problem), 400), "correct TRAIN_FILE" if own else fix)
            continue
        warm_up = s.INIT == "sft" and s.SFT_SOURCE == "task"
        by = {"train": "TRAIN_BATCH_SIZE", "sft": "SFT_BATCH_SIZE" if warm_up else ""}.get(name, "")
        wanted = getattr(s, by) if by else 0
        if rows < wanted:
            yield error("data", f"{file}: {rows} rows, fewer than {by}={wanted}", f"lower {by}, or take more data")
        else:
            yield ok("data", f"{file}: {rows} rows")
    if manifest and sound and not training:  # a training's data stage does it itself
        try:
            check_held_out(s, manifest["rows"])
        except DataError as problem:
            yield error("data", one_line(str(problem), 400))
    if manifest.get("gold"):
        yield from gold_check(s, manifest, training)


def gold_check(s: Settings, manifest: dict, training: bool) -> Iterator[Finding]:
    """Do all demonstrations get acc 1? ``training``: its data stage says so itself, unless that is an error."""
    entry, text = manifest["gold"], gold.said(manifest["gold"], s)
    fix = f"correct these rows, {s.reward_file} or the limits, or set GOLD=drop"
    current = entry["reward"] == code_digest(s.reward_file)
    if current and gold.failed(manifest, s) and s.GOLD == "error":
        yield error("gold check", text, fix)
    elif training:
        return
    elif not current:
        yield warning("gold check", "reward.py has changed since", f"`make data TASK={s.TASK}` checks again")
    elif gold.failed(manifest, s):
        yield warning("gold check", text, fix)
    else:
        yield ok("gold check", text)


def reward(s: Settings) -> Iterator[Finding]:
    """The task's reward on the cases of examples.jsonl, which state their score."""
    try:
        count = check_examples(s.task_dir, load_reward(s))
    except (RewardError, SettingsError) as problem:
        yield error("reward", one_line(str(problem), 400), f"correct {s.reward_file} or examples.jsonl")
        return
    yield ok("reward", f"as stated on {count} cases of examples.jsonl")


def lengths(s: Settings, by: float) -> Iterator[Finding]:
    """How many prompts fit MAX_PROMPT_LENGTH with the model's tokenizer (verl drops the others), and how many
    demonstrations MAX_RESPONSE_LENGTH. Skipped after ``by`` (time.monotonic)."""
    folder, manifest = _folder(base_model(s.MODEL)), s.made()
    if folder is None:
        return
    files = {"prompts": s.train_file} if s.train_file.is_file() and (manifest or s.TRAIN_FILE) else {}
    if files and not s.TRAIN_FILE and manifest.get("tokenizer") == s.MODEL:
        yield ok("prompts", "measured with MODEL's tokenizer when the data was made")
        del files["prompts"]
    if s.train_file.is_file() and "sft" in manifest.get("rows", ()):
        files["demonstrations"] = s.data_dir / "sft.parquet"
    if time.monotonic() > by:
        yield ok(" and ".join(files) or "tokenizer", "not measured: the other checks took too long")
        return
    try:  # also before there are rows: a training would fail minutes later
        tokenizer = load_tokenizer(str(folder), weights=False, download=False)
    except DataError as problem:
        yield error("tokenizer", str(problem), "take an instruct model whose tokenizer needs no code of its own")
        return
    try:
        found = {what: measured(tokenizer, file) for what, file in files.items()}
    except (DataError, OSError, pa.ArrowException):
        return  # ``data`` reports it
    except Exception as problem:  # a broken config or tokenizer may raise anything
        text = one_line(str(problem), 300)
        yield error("prompts", f"MODEL={s.MODEL}: the tokenizer fails on the prompts: {text}", "take an instruct model")
        return
    for what, (tokens, total) in found.items():
        yield fit(s, what, tokens, s.TRAIN_BATCH_SIZE * len(tokens) / total, total)


def fit(s: Settings, what: str, tokens: list[int], least: float, total: int | None = None) -> Finding:
    """Whether prompts fit MAX_PROMPT_LENGTH, and demonstrations MAX_RESPONSE_LENGTH. ``tokens``: of those of the
    ``total`` (default: all) that were measured; with fewer than ``least`` prompts that fit it is an error."""
    name = "MAX_PROMPT_LENGTH" if what == "prompts" else "MAX_RESPONSE_LENGTH"
    limit, longest = getattr(s, name), max(tokens)
    long = sum(length > limit for length in tokens)
    measured = f"{len(tokens)} of {total or len(tokens)} measured"
    text = f"{measured}, the longest has {longest} tokens, the mean {sum(tokens) / len(tokens):.0f}"
    if not long:
        return ok(what, f"{text}, {name}={limit}")
    text, fix = f"{text}; {long} are longer than {name}", f"raise {name}={limit} to {longest}"
    if what == "prompts" and len(tokens) - long < least:
        return error(what, f"{text}, too many: they are left out", fix)
    return warning(what, f"{text} {'and are left out' if what == 'prompts' else 'where RL cuts a response'}", fix)


def measured(tokenizer, file: Path) -> tuple[list[int], int]:
    """Tokens of PROMPTS rows of ``file``, spread over it, as far as the time goes, and the number of its rows. Of an RL
    row the prompt counts, of a demonstration the response: its last message, or all turns and results of an episode."""
    total = pq.read_metadata(file).num_rows
    tokens, until = [], time.monotonic() + PROMPT_SECONDS
    for row in islice(read_rows(file), 0, None, max(1, total // PROMPTS)):
        if "prompt" in row:
            tokens.append(len(prompt_ids(tokenizer, decoded(row["prompt"]), tools_of(row))))
        elif first := row.get("prompt_messages"):
            ids, mask = demonstration_ids(tokenizer, decoded(row["messages"]), first, tools_of(row))
            tokens.append(len(ids) - mask.index(1))
        else:
            tokens.append(len(answer_ids(tokenizer, row["messages"][-1]["content"])))
        if time.monotonic() > until:
            break
    return tokens, total


# ---- settings ------------------------------------------------------------------------------------------------------


def numbers(s: Settings) -> Iterator[Finding]:
    """Whether a pass of the stack computes MODEL's own log-probs and gradient (training/parity.py)."""
    if not s.needs_verl:
        return  # TRL has passes of its own
    found = parity.play(s)
    if "unknown" in found:
        text = f"the passes of STACK={s.STACK} were not compared with the plain model: {found['unknown']}"
        yield warning("numbers", text, "watch rollout_corr/k3_kl in the first steps")
    if "refused" in found:
        yield error("numbers", f"MODEL={s.MODEL}: {found['refused']}", "take another METHOD")
    if "unsampled" in found:
        yield error("numbers", f"MODEL={s.MODEL}: {found['unsampled']}", "take another MODEL")
    if not (results := found.get("paths")):
        return
    if off := found["noise"]:
        named = ", ".join(f"{name}={value:g}" for name, value in off.items())
        yield warning("numbers", f"MODEL's {named}: would make each pass another policy; the training sets 0")
    by_problem: dict[str, list[str]] = {}
    for name, result in results.items():
        if not result["agrees"]:
            by_problem.setdefault(_said(result), []).append(f"`{name}`")
    wrong = [f"{' and '.join(names)} {problem}" for problem, names in by_problem.items()]
    right = next((name for name, result in results.items() if result["agrees"]), "")
    if not right:
        text = f"no pass of STACK={s.STACK} computes what MODEL={s.MODEL} computes: {'; '.join(wrong)}"
        yield error("numbers", text, "take another MODEL")
        return
    faster = found.get("liger", {})
    taken = f"`{right}` with liger-kernel" if faster.get("agrees") else f"`{right}`"
    said = _said(faster if faster.get("agrees") else results[right])
    if wrong:
        yield warning("numbers", "; ".join(wrong), f"trains by {taken}, which {said}")
    else:
        yield ok("numbers", f"the pass {taken} {said}")
    if faster and not faster["agrees"]:
        yield warning("numbers", f"`{right}` with liger-kernel {_said(faster)}", "trains without it: a slower update")


def _said(result: dict) -> str:
    """What a path's numbers are beside the plain model's."""
    if "failed" in result:
        return f"cannot: {result['failed']}"
    named = {"gradient": "the gradient", "values": "the critic's values"}
    others = [f"{text} by {result[name]:.1g}" for name, text in named.items() if name in result]
    verb = "agrees" if result["agrees"] else "is wrong"
    return f"{verb} (log-probs off by {result['nats']:.2g} nats, {', '.join(others)})"


def model(s: Settings, arguments: Sequence[str] = ()) -> Iterator[Finding]:
    if s.MODEL == "embedded":
        return
    try:
        if not is_adapter(Path(s.MODEL).expanduser()):
            resolve_model(s.MODEL)
    except SettingsError as problem:
        yield error("model", str(problem), "set MODEL")
        return
    yield from untrainable(s, arguments)


def untrainable(s: Settings, arguments: Sequence[str] = ()) -> Iterator[Finding]:
    """Weights that no training updates, a family that transformers has no class of, and one that takes no adapter."""
    with suppress(ValueError):  # neither a folder nor a hub id
        config = read_json(memory.config_file(base_model(s.MODEL)) or Path())
        kind = one_line(str(config.get("model_type", "llama")), 60)
        if config.get("quantization_config"):
            text = f"MODEL={s.MODEL}: its weights are quantized"
            yield error("model", text, "take the model that they were made from")
        named = s.INIT == "base" and any("model.target_modules=[" in argument for argument in arguments)
        if s.LORA_RANK and kind in WITHOUT_LORA and not named:  # the warm-up takes no ARGS
            text = f"LORA_RANK={s.LORA_RANK}: peft puts no adapter on every layer of model_type={kind}"
            some = "INIT=base and layers in ARGS (verl's model.target_modules)"
            yield error("model", text, f"set LORA_RANK=0, or {some}")
        if kind not in memory.PLAIN:
            from transformers import CONFIG_MAPPING

            if kind not in CONFIG_MAPPING:
                text = f"transformers has no model_type={kind}, and code that comes with a model is never run"
                yield error("model", f"MODEL={s.MODEL}: {text}", "take another MODEL")


def _folder(model: str) -> Path | None:
    """The folder on this machine with the tokenizer of MODEL; None if there is none yet."""
    folder = embedded_folder() if model == "embedded" else Path(model).expanduser()
    if folder.is_dir() or model == "embedded" or model[0] in "/.~":
        return folder if folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "tokenizer_config.json") if "/" in model else None
    return Path(found).parent if isinstance(found, str) else None


# ---- all checks ----------------------------------------------------------------------------------------------------


def findings(
    s: Settings, arguments: list[str], stage: str = "doctor", runs: Sequence[Settings] = (), jobs: int = 1
) -> list[Finding]:
    """The findings of all checks. ``stage``: doctor, or the stage that is about to train; ``runs``, ``jobs``: as of
    ``checkpoint_sizes``."""
    smi = hardware.nvidia() if s.STACK != "cpu" else None
    started = time.monotonic()  # without a driver that is slow to start
    wrong = list(model(s, arguments))
    continued = stage_of(stage).trains
    at_once = jobs_of(s, runs, jobs)
    sizes = checkpoint_sizes(s, runs, jobs, arguments, continued)
    checks = [of_machine(s, smi, runs, at_once), disk(s, sizes), packages(s), ray()]
    checks += [judge(), reward(s), data(s, stage != "doctor")]
    checks += [of_the_last_run(s)] if stage == "doctor" else []
    if not wrong:
        each_method = of_each_method(s, runs)
        checks += [numbers(run) for run in each_method]  # before the memory, which follows the pass
        checks += [batches_and_memory(run, arguments, stage, smi, at_once) for run in each_method]
        # Before a training there is time: prompts that are all left out end it minutes later.
        checks.append(lengths(s, math.inf if stage_of(stage).trains else started + TOKENIZER_BY))
    return [*wrong, *dict.fromkeys(chain(*checks))]


def before_training(
    s: Settings, arguments: list[str], stage: str, runs: Sequence[Settings] = (), jobs: int = 1
) -> None:
    """Print warnings and errors; raise SettingsError with the last error, which ends the command. ``runs``: those of an
    experiment, ``jobs`` at a time."""
    found = findings(s, arguments, stage, runs, jobs)
    bad = [finding for finding in found if finding.state != "ok"]
    last = next((finding for finding in reversed(bad) if finding.state == "error"), None)
    for finding in bad:
        if finding != last:
            print(f"{finding.state}: {finding}", flush=True)
    if last:
        raise SettingsError(str(last))
    if not bad:
        print(f"doctor: {len(found)} checks ok", flush=True)


def report(s: Settings, arguments: list[str]) -> None:
    """`make doctor`: a line for each finding. Exits with 1 when there is an error."""
    started = time.monotonic()
    found = findings(s, arguments)
    for finding in found:
        show(f"{finding.state:<8} {finding}")
    counts = {state: sum(finding.state == state for finding in found) for state in ("ok", "warning", "error")}
    seconds = time.monotonic() - started
    show(f"{counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors ({seconds:.1f} s)")
    if counts["error"]:
        sys.exit(1)
