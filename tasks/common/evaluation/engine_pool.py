"""Several engines of one machine as one engine: each in a process of its own, on GPUs of its own or shared."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from unittest import mock

from tasks.common.evaluation import engines
from tasks.common.evaluation.rollouts import Completion
from tasks.common.visible_gpus import gpu_groups, named_gpus

SECONDS_TO_END = 20


class EngineEnded(Exception):
    """The process of an engine ended before its answers did."""


class EnginePool:
    """``count`` engines of the kind ``backend``, each on the next ``tensor_parallel`` of the visible GPUs, which
    ``sharing`` of them have in common, with ``arguments`` for each. The requests are shared out; each has a seed of its
    own, so that ``count`` changes nothing.
    """

    def __init__(self, count: int, backend: str, *arguments, tensor_parallel: int = 1, sharing: int = 1):
        spawn = multiprocessing.get_context("spawn")
        self.engines: list[tuple[Connection, multiprocessing.Process]] = []
        threads = str(max(1, len(os.sched_getaffinity(0)) // count))
        # Where no GPU is listed: on a CPU, or without nvidia-smi. Those that the user hides stay hidden.
        numbered = [[str(number)] if named_gpus() is None else [] for number in range(count)]
        shared = {"SHARED_GPU": str(sharing)} if sharing > 1 else {}
        for gpus in gpu_groups(tensor_parallel, count // sharing) * sharing or numbered:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(theirs, backend, arguments, tensor_parallel))
            own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": threads} | shared
            with mock.patch.dict(os.environ, own):
                process.start()
            theirs.close()  # the process has it: its end is then the end of the connection
            self.engines.append((ours, process))
        self._answers()  # all have started

    def load(self, model: str) -> bool:
        """As VLLMEngine.load."""
        self._ask("load", *[(model,)] * len(self.engines))
        return all(self._answers())

    def generate(
        self, requests: list[engines.Request], sampling: engines.Sampling
    ) -> Iterator[tuple[engines.Request, list[Completion]]]:
        """As VLLMEngine.generate."""
        count = len(self.engines)
        self._ask("generate", *((requests[number::count], sampling) for number in range(count)))
        running = {connection for connection, _ in self.engines}
        while running:
            for connection in wait(list(running)):
                if found := self._received(connection):
                    yield found
                else:
                    running.discard(connection)

    def close(self) -> None:
        """End all. On a GPU the process of an engine of vLLM 0.24 may not end by itself once that is closed."""
        for connection, _ in self.engines:
            connection.close()
        for _, process in self.engines:
            process.join(SECONDS_TO_END)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _ask(self, name: str, *arguments: tuple) -> None:
        for (connection, _), own in zip(self.engines, arguments, strict=True):
            with self._alive():
                connection.send((name, own))

    def _answers(self) -> list:
        return [self._received(connection) for connection, _ in self.engines]

    def _received(self, connection: Connection):
        with self._alive():
            return connection.recv()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Where an engine has ended, all end, and EngineEnded is raised."""
        try:
            yield
        except (EOFError, OSError):
            for _, process in self.engines:
                process.terminate()
            raise EngineEnded("an engine ended before its answers did; its error stands above") from None


def _serve(connection: Connection, backend: str, arguments: tuple, tensor_parallel: int) -> None:
    """The process of an engine: it answers until the other end of ``connection`` is closed."""
    engine = engines.ENGINES[backend](*arguments, tensor_parallel=tensor_parallel)
    connection.send(None)
    while True:
        try:
            name, own = connection.recv()
        except EOFError:
            return engine.close()
        if name == "load":
            connection.send(engine.load(*own))
        else:
            for found in engine.generate(*own):
                connection.send(found)
            connection.send(None)
