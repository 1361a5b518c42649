"""How many engines a machine has, and several as one: each in a process of its own, on GPUs of its own or shared."""

import contextlib
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

from verl_tasks.evaluation import engines
from verl_tasks.evaluation.rollouts import Completion
from verl_tasks.machine.hardware import nvidia, ram
from verl_tasks.models.merge import base_model
from verl_tasks.settings import Settings, SettingsError
from verl_tasks.visible_gpus import gpu_groups, named_gpus, visible_gpus

SECONDS_TO_END = 20
TICK = 0.02  # seconds between two looks for requests that join
ENGINE_SAMPLES = 512  # one more engine on the same GPU is not worth its start with fewer
MOST_SHARING = 4


@dataclass(frozen=True)
class Hardware:
    """``engines`` at once, each on ``tensor_parallel`` GPUs. ``sharing`` of them have the same GPUs and divide vLLM's
    share of their memory."""

    engines: int = 1
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.5
    sharing: int = 1

    @classmethod
    def of(cls, s: Settings) -> "Hardware":
        return cls(max(1, s.N_GPUS // s.TP), s.TP, s.GPU_MEMORY_UTILIZATION)

    def shared(self, model: str) -> "Hardware":
        """With several engines on each GPU where ``model`` is small: vLLM's scheduler takes longer for a step than the
        GPU does. Each has a GPU's memory for four times the weights, four cores and 8 GB of RAM."""
        found = None if os.environ.get("SHARED_GPU") or self.tensor_parallel > 1 else nvidia()
        weights = sum(file.stat().st_size for file in Path(base_model(model)).glob("*.safetensors"))
        if not found or not found.gpus or not weights:
            return self
        fitting = int(self.gpu_memory_utilization * found.gpus[0].total / (4 * weights))
        served = min(len(os.sched_getaffinity(0)) // 4, ram()[0] // 8_000_000_000) // self.engines
        sharing = max(1, min(MOST_SHARING, fitting, served))
        return replace(self, engines=self.engines * sharing, sharing=sharing)

    def enough(self, prompts: int, samples: int) -> "Hardware":
        """Without engines that would have no prompt, or on a shared GPU fewer than ENGINE_SAMPLES ``samples``."""
        if self.engines <= min(prompts, samples // ENGINE_SAMPLES):
            return self
        return replace(self, engines=max(1, min(self.engines // self.sharing, prompts)), sharing=1)

    def engine(self, model: str, max_model_len: int, seed: int):
        """One engine, or all as one. Raises SettingsError where a GPU is missing, and as VLLMEngine."""
        if self.tensor_parallel > 1 and not gpu_groups(self.tensor_parallel, 1):
            raise SettingsError(f"TP={self.tensor_parallel}: visible GPUs: {len(visible_gpus())}; set TP lower")
        how = (model, max_model_len, seed, self.gpu_memory_utilization / self.sharing, self.tensor_parallel)
        return EnginePool(self, how) if self.engines > 1 else engines.VLLMEngine(*how)


class EngineEnded(Exception):
    """The process of an engine ended before its answers did."""


class EnginePool:
    """The engines of ``hardware``, each on the next GPUs of those that are visible, with ``arguments`` for each. The
    requests are shared out; each has a seed of its own, so that the number of engines changes nothing."""

    def __init__(self, hardware: Hardware, arguments: tuple):
        spawn, count, sharing = multiprocessing.get_context("spawn"), hardware.engines, hardware.sharing
        self.engines: list[tuple[Connection, multiprocessing.Process]] = []
        threads = str(max(1, len(os.sched_getaffinity(0)) // count))
        # Where no GPU is listed: on a CPU, or without nvidia-smi. Those that the user hides stay hidden.
        numbered = [[str(number)] if named_gpus() is None else [] for number in range(count)]
        shared = {"SHARED_GPU": str(sharing)} if sharing > 1 else {}
        for gpus in gpu_groups(hardware.tensor_parallel, count // sharing) * sharing or numbered:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, arguments))
            own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": threads} | shared
            with mock.patch.dict(os.environ, own):
                process.start()
            theirs.close()  # the process has it: its end is then the end of the connection
            self.engines.append((ours, process))
        list(self._answers())  # all have started

    def load(self, model: str) -> bool:
        """As VLLMEngine.load."""
        return all([*self._answers("load", [(model,)] * len(self.engines))])

    def generate(
        self,
        requests: list[engines.Request],
        sampling: engines.Sampling,
        more: Callable[[], list[engines.Request]] = list,
    ) -> Iterator[tuple[engines.Request, list[Completion]]]:
        """As VLLMEngine.generate."""

        def shares(found: list[engines.Request]) -> list[tuple]:
            of = [([], sampling) for _ in self.engines]
            for number, request in enumerate(found):
                # An episode stays with the engine that has its earlier turns in its cache.
                turn = isinstance(request, engines.TurnRequest)
                of[(request.index + request.sample if turn else number) % len(of)][0].append(request)
            return of

        yield from self._answers("generate", shares(requests), lambda: shares(found) if (found := more()) else [])

    def close(self) -> None:
        """End all. On a GPU the process of an engine of vLLM 0.24 may not end by itself once that is closed."""
        for connection, _ in self.engines:
            connection.close()
        for _, process in self.engines:
            process.join(SECONDS_TO_END)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _answers(
        self, name: str = "", arguments: Iterable[tuple] = (), more: Callable[[], Iterable[tuple]] = list
    ) -> Iterator:
        """What the engines answer to ``name``, as it comes; ``more`` is asked for further ``arguments`` meanwhile.
        Where one has ended, all end, and EngineEnded is raised."""
        unanswered = Counter(connection for connection, _ in self.engines)
        try:
            for (connection, _), own in zip(self.engines, arguments, strict=False):
                connection.send((name, own))
            while unanswered:
                for connection in wait([*unanswered], TICK):
                    if (answer := connection.recv()) is None:
                        unanswered -= Counter([connection])
                    else:
                        yield answer
                for (connection, _), own in zip(self.engines, more(), strict=False):
                    connection.send((name, own))
                    unanswered[connection] += 1
        except (EOFError, OSError):
            for _, process in self.engines:
                process.terminate()
            raise EngineEnded("an engine ended before its answers did; its error stands above") from None


def _serve(connection: Connection, arguments: tuple) -> None:
    """The process of an engine: it answers until the other end of ``connection`` is closed."""
    engine, asked = engines.VLLMEngine(*arguments), SimpleQueue()
    # A thread reads, so that neither end waits for the other to read.
    threading.Thread(target=_receive, args=(connection, asked), daemon=True).start()
    connection.send(None)

    def more() -> list[engines.Request]:
        found = []
        while not asked.empty():
            if (message := asked.get()) is None:
                asked.put(None)
                break
            found += message[1][0]
            connection.send(None)  # its answers stand before the end of those that it joins
        return found

    while message := asked.get():
        name, own = message
        for answer in [engine.load(*own)] if name == "load" else engine.generate(*own, more):
            connection.send(answer)
        connection.send(None)
    engine.close()


def _receive(connection: Connection, asked: SimpleQueue) -> None:
    """Put what comes from ``connection`` into ``asked``, and None at its end."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.put(connection.recv())
    asked.put(None)
