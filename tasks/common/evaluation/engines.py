"""vLLM's offline engine, as evaluation uses it."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_tasks.errors import said
from verl_tasks.evaluation.rollouts import GREEDY, TOO_LONG, Completion
from verl_tasks.machine.hardware import CPU_BLOCK_SIZE, CUDA_GRAPHS, cpu_dtype, shared_kv_cache
from verl_tasks.machine.memory import short_window
from verl_tasks.models.chat_template import opens_thinking, prompt_ids
from verl_tasks.models.merge import RANKS, base_model, is_adapter, max_rank
from verl_tasks.process import imports
from verl_tasks.settings import SettingsError
from verl_tasks.text import one_line

# What vLLM's worker class inherits from.
EXTENSION = "verl_tasks.verl_plugins.reloading.Reloading"
EXTENSION_OF_CPU = "verl_tasks.verl_plugins.cpu.sampling.Sampling"
EXTENSION_OF_0_11 = "verl_tasks.verl_plugins.verl_061.many_sequences.ManySequences"
WINDOW = 4096  # tokens of a prompt in `make batch`, of a conversation in `make chat`
LOGPROBS = 20  # vLLM's default limit (max_logprobs)
CPU_SEQUENCES = 64  # that are sampled at once (docs/CPU.md)
# A CUDA graph for each of these batch sizes. 1,024: vLLM's limit on an H100.
GRAPHS = CUDA_GRAPHS | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, *range(128, 1025, 128)]}
SKIPPED = Completion("", TOO_LONG, 0, 0.0)


@dataclass(frozen=True)
class Sampling:
    """``n`` samples per prompt at ``temperature`` and ``top_p``, and a greedy response if ``greedy``. Lengths are in
    tokens. Of ``seed`` each request has its own, so that neither its neighbours nor the number of engines matter."""

    n: int
    greedy: bool
    temperature: float
    top_p: float
    max_prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Request:
    """One greedy response or n samples (``mode``) to the chat ``messages`` of prompt ``index``; ``tools``: OpenAI's."""

    index: int
    mode: str
    messages: list[dict]
    tools: list[dict] | None = None

    def seed(self, seed: int) -> int:
        """The seed of its first sample under the ``seed`` of all; vLLM gives the n-th sample the n-th after it."""
        return int.from_bytes(hashlib.blake2b(self._text(seed).encode(), digest_size=7).digest(), "big")

    def _text(self, seed: int) -> str:
        return f"{seed} {self.index}"


@dataclass(frozen=True)
class TurnRequest(Request):
    """One turn of an episode, of at most ``max_tokens``: ``ids`` are the tokens of all before it, in place of
    ``messages``. ``sample``: which of the n episodes of the prompt; ``turn``: which of its turns, from 0. ``stop``:
    texts that end it."""

    ids: tuple[int, ...] = ()
    max_tokens: int = 0
    sample: int = 0
    turn: int = 0
    stop: tuple[str, ...] = ()

    def _text(self, seed: int) -> str:
        return f"{seed} {self.index} {self.sample} {self.turn}"


def token_entropy(logprobs: np.ndarray) -> np.ndarray:
    """Entropy in nats of each next-token distribution, from its ``logprobs`` of the k likeliest tokens, (tokens, k).

    ``-sum p_i ln p_i - r ln min(r, p_k)`` with ``r = 1 - sum p_i``, the mass of the tail, and p_k the smallest of the
    k: no tail token is likelier than p_k or than r. A lower bound, exact where k = V and for a uniform distribution;
    it misses at most ``r ln((V - k) min(r, p_k) / r)`` for a vocabulary of V.
    """
    p = np.exp(logprobs)
    rest = np.clip(1 - p.sum(-1), 0, 1)
    known = -(p * np.where(p > 0, logprobs, 0)).sum(-1)
    tail = np.where(rest > 1e-6, -rest * np.log(np.maximum(np.minimum(rest, p.min(-1)), 1e-300)), 0.0)  # else: rounding
    return np.maximum(known + tail, 0.0)


def request_ids(tokenizer, request: Request, sampling: Sampling) -> list[int] | None:
    """Token ids of a request's prompt; None if it is too long. Raises ValueError as chat_template.prompt_ids."""
    if isinstance(request, TurnRequest):
        return list(request.ids)
    ids = prompt_ids(tokenizer, request.messages, request.tools)
    return ids if len(ids) <= sampling.max_prompt_tokens else None


def log_probs(logprobs, ids: list[int]) -> tuple[list[float], np.ndarray]:
    """Log-probs of the sampled tokens ``ids`` and of the LOGPROBS likeliest of each, (tokens, LOGPROBS), from vLLM's
    output: flat with the sampled token's first, or (vLLM 0.11.0) a dict per token, where it is extra unless among the
    likeliest."""
    if hasattr(logprobs, "logprobs"):
        flat = np.array(logprobs.logprobs).reshape(len(ids), -1)
        return flat[:, 0].tolist(), flat[:, 1:]
    likeliest = [sorted((entry.logprob for entry in of.values()), reverse=True)[:LOGPROBS] for of in logprobs]
    return [of[token].logprob for of, token in zip(logprobs, ids, strict=True)], np.array(likeliest)


def stop_ids(model: str) -> list[int]:
    """The tokens that end an answer, beside the tokenizer's: of the generation config, else of the model's own."""
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no generation_config.json
        ends = AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict().get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _kind(model: str) -> list | None:
    """What two models share that can take each other's place in an engine; None for a LoRA adapter."""
    from transformers import AutoConfig, AutoTokenizer

    if is_adapter(Path(model)):
        return None
    config = AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict()
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    # vLLM ends an answer at stop_ids and the tokenizer's; verl writes the tokenizer's into the config as well.
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", *ends):
        config.pop(name, None)
    return [config, tokenizer.get_vocab(), tokenizer.chat_template, tokenizer.eos_token_id, stop_ids(model)]


@dataclass(frozen=True)
class _Platform:
    """What an engine is told where it runs; None: vLLM's own default."""

    dtype: str
    extension: str
    block_size: int | None = None
    chunked_prefill: bool | None = None
    prefix_caching: bool | None = None
    graphs: dict | None = None
    sequences: int | None = None

    @classmethod
    def here(cls, model: str) -> "_Platform":
        """``model``: what is sampled, no adapter."""
        import vllm
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            # A part of a prompt samples a token for nothing: vLLM 0.30 on a CPU cannot take back what that drew
            # (gpu_model_runner.py:3723).
            # More sequences at once sample no faster on a CPU, and the first ones end later.
            # A recurrent layer's state is kept in parts of prompts only.
            caches = False if _recurrent(model) else None
            own = {"chunked_prefill": False, "prefix_caching": caches, "sequences": CPU_SEQUENCES}
            return cls(cpu_dtype(), EXTENSION_OF_CPU, CPU_BLOCK_SIZE, **own)
        if vllm.__version__.startswith("0.11.0"):  # graphs were never tried
            return cls("bfloat16", EXTENSION_OF_0_11)
        return cls("bfloat16", EXTENSION, graphs=GRAPHS)


def _recurrent(model: str) -> bool:
    """Whether ``model`` has layers with a state (Falcon-H1, Granite 4, LFM2); False where vLLM cannot load it."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    with contextlib.suppress(RuntimeError, ValueError):  # a package or family is missing, as vLLM says at its start
        names = AutoConfig.from_pretrained(model, trust_remote_code=False).architectures or []
        found = [ModelRegistry.models[name].inspect_model_cls() for name in names if name in ModelRegistry.models]
        return any(each.is_hybrid or each.is_attention_free for each in found)
    return False


class VLLMEngine:
    """vLLM's offline engine on ``tensor_parallel`` GPUs. A LoRA adapter is applied to its base model as it samples.
    Raises SettingsError for a model with which vLLM does not start."""

    def __init__(
        self, model: str, max_model_len: int, seed: int, gpu_memory_utilization: float, tensor_parallel: int = 1
    ):
        with imports():
            from vllm import LLM
            from vllm.lora.request import LoRARequest
        lora, platform = is_adapter(Path(model)), _Platform.here(base_model(model))
        self.adapter = LoRARequest(lora_name="adapter", lora_int_id=1, lora_path=model) if lora else None
        try:
            self.llm = LLM(
                base_model(model),
                enable_lora=lora,
                max_lora_rank=max_rank(Path(model)) if lora else RANKS[0],
                max_model_len=max_model_len,
                seed=seed,
                tensor_parallel_size=tensor_parallel,
                max_logprobs=LOGPROBS,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_memory_bytes=shared_kv_cache(gpu_memory_utilization),
                disable_log_stats=True,
                dtype=platform.dtype,
                worker_extension_cls=platform.extension,
                block_size=platform.block_size,
                max_num_seqs=platform.sequences,
                enable_chunked_prefill=platform.chunked_prefill,
                enable_prefix_caching=platform.prefix_caching,
                enforce_eager=not platform.graphs,
                compilation_config=platform.graphs,
            )
        except Exception as error:  # whatever a family's code raises
            if isinstance(error, OSError) or "root cause" in str(error):  # of another process, in the log
                raise
            raise SettingsError(f"MODEL={model}: vLLM does not start with it: {said(error)}") from error
        self.tokenizer = self.llm.get_tokenizer()
        self.model = model

    def load(self, model: str) -> bool:
        """Put ``model`` in place of the one that is loaded, as a new engine would have it; False where that takes a new
        engine: for an adapter, another architecture, another tokenizer or other ends of an answer, and where there are
        recurrent layers, of which vLLM 0.30 would keep old weights (model_loader/reload/layerwise.py)."""
        if model != self.model:
            kind = _kind(model)
            if kind is None or kind != _kind(self.model) or _recurrent(model):
                return False
            self.llm.collective_rpc("take_weights", args=(model,))
            self.model = model
        self.llm.reset_prefix_cache()
        return True

    def generate(
        self, requests: list[Request], sampling: Sampling, more: Callable[[], list[Request]] = list
    ) -> Iterator[tuple[Request, list[Completion]]]:
        """Each request with its completions, in the order in which they end. ``more`` is asked between two tokens for
        requests that join them. Decodes a response once, at its end, and never the 20 alternatives to a token, as
        vLLM's own output does."""
        engine, running, numbers = self.llm.llm_engine, {}, map(str, itertools.count())
        while requests:
            for request in requests:
                ids = request_ids(self.tokenizer, request, sampling)
                if ids is None:
                    yield request, [SKIPPED]
                    continue
                running[number := next(numbers)] = request, opens_thinking(self.tokenizer, ids)
                params, prompt = self._params(request, sampling), {"prompt_token_ids": ids}
                engine.add_request(number, prompt, params, lora_request=self.adapter)
            requests = []
            while not requests and engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        request, thinking = running.pop(output.request_id)
                        yield request, [self._completion(request, one, thinking) for one in output.outputs]
                requests = more()

    def _params(self, request: Request, sampling: Sampling):
        """vLLM's SamplingParams of ``request``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy, turn = request.mode == GREEDY, isinstance(request, TurnRequest)
        stop = [*request.stop] if turn else []
        params = SamplingParams(
            n=1 if greedy or turn else sampling.n,
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            seed=request.seed(sampling.seed),
            max_tokens=request.max_tokens if turn else sampling.max_tokens,
            # One output with all n; the default returns each of the n separately, as it ends.
            output_kind=RequestOutputKind.FINAL_ONLY,
            logprobs=LOGPROBS,
            stop=stop,
            detokenize=bool(stop),
        )
        if hasattr(params, "flat_logprobs"):  # not in vLLM 0.11.0, which returns a dict of objects per token
            params.flat_logprobs = True
        return params

    def _completion(self, request: Request, one, thinking: bool) -> Completion:
        """``one`` of vLLM's outputs for ``request``."""
        ids, entropy, own = list(one.token_ids), 0.0, []
        if ids:
            own, likeliest = log_probs(one.logprobs, ids)
            entropy = float(token_entropy(likeliest).mean())
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        of_turn = (tuple(ids), tuple(own)) if isinstance(request, TurnRequest) else ()
        return Completion(text, str(one.finish_reason), len(ids), entropy, thinking, *of_turn)

    def stream(self, messages: list[dict], sampling: Sampling, tools: list[dict] | None = None) -> Iterator[str]:
        """The pieces of one answer as they come; ``think_opened`` then says whether it began inside of ``<think>``.
        Raises ValueError when the chat is longer than the model's window."""
        ids = prompt_ids(self.tokenizer, messages, tools)
        self.think_opened = opens_thinking(self.tokenizer, ids)
        if len(ids) > sampling.max_prompt_tokens:
            raise ValueError(f"the conversation has {len(ids)} tokens, {sampling.max_prompt_tokens} fit: /reset")
        return (piece.response for piece in self.stream_ids(ids, sampling))

    def stream_ids(self, ids: list[int], sampling: Sampling, stop: tuple[str, ...] = ()) -> Iterator[Completion]:
        """The pieces of one answer to the prompt ``ids`` as they come, each with its text and ids; the last one has the
        ``finish_reason``. ``stop``: texts that end it. Closing it ends the answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_tokens)
        params.output_kind, params.stop = RequestOutputKind.DELTA, [*stop]
        engine = self.llm.llm_engine
        self.asked = getattr(self, "asked", 0) + 1
        engine.add_request(f"chat-{self.asked}", {"prompt_token_ids": ids}, params, lora_request=self.adapter)
        try:
            while engine.has_unfinished_requests():
                for output in engine.step():
                    (new,) = output.outputs
                    found = tuple(new.token_ids)
                    yield Completion(new.text, str(new.finish_reason or ""), len(found), 0.0, ids=found)
        finally:  # interrupted: the next question must not wait for this answer
            engine.abort_request([f"chat-{self.asked}"])

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def window(model: str, max_new_tokens: int, before: int = WINDOW) -> int:
    """Context length to ask the engine for: ``before`` plus the response, or the model's own limit where that is
    smaller. Raises SettingsError for a model that cannot be found, and when the response alone would fill it.

    With LongRoPE the limit is that of short texts: where more is asked for, vLLM turns all texts as long ones, and no
    training does. Callers who ask for more than WINDOW want long texts.
    """
    from transformers import AutoConfig

    try:
        # Without that transformers asks on the terminal whether to run the code of a model.
        config = AutoConfig.from_pretrained(base_model(model), trust_remote_code=False).get_text_config()
        short = short_window(config.to_dict()) if before <= WINDOW else 0
    except Exception as error:  # classes of huggingface_hub, too
        raise SettingsError(f"MODEL={model}: {one_line(str(error), 200)}") from error
    largest = short or getattr(config, "max_position_embeddings", None) or before + max_new_tokens
    if max_new_tokens >= largest:
        raise SettingsError(f"MAX_NEW_TOKENS={max_new_tokens}: {model} has a window of {largest} tokens; lower it")
    return min(largest, before + max_new_tokens)
