"""The end of several engines: also of one whose process would go on."""

import threading
import time

import psutil

from tasks.common.evaluation import engine_pool, engines


class Endless:
    """An engine whose process has a thread that goes on after close."""

    def __init__(self, *arguments, tensor_parallel: int = 1):
        threading.Thread(target=time.sleep, args=(600,)).start()

    def close(self) -> None:
        pass


engines.ENGINES["endless"] = Endless  # the processes of the pool import this file


def test_a_process_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(engine_pool, "SECONDS_TO_END", 0.5)
    monkeypatch.setattr(engine_pool, "_serve", serve)
    pool = engine_pool.EnginePool(2, "endless")
    processes = [psutil.Process(process.pid) for _, process in pool.engines]
    assert all(process.is_running() for process in processes)
    pool.close()
    assert not any(process.is_running() for process in processes)


_serve = engine_pool._serve


def serve(*arguments) -> None:
    """engine_pool's, in a process that has read this file and so knows the engine."""
    _serve(*arguments)
