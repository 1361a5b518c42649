"""SIGINT (Ctrl-C), SIGTERM and SIGHUP (a terminal or an ssh connection that closes): each ends a command in order."""

import contextlib
import signal
import threading
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on_sigterm() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, with all clean-up. `nohup` keeps SIGHUP ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


class Interrupts:
    """Within the block the first signal of ENDING raises KeyboardInterrupt, and further ones do nothing.

    So a second Ctrl-C does not break off the clean-up that the first began. Signals that this process ignores stay
    ignored; outside of the main thread, where Python handles no signal, the block changes nothing.
    """

    def __init__(self):
        self._heard = self._held = False
        self._before = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heeded}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number, frame) -> None:
        first, self._heard = not self._heard, True
        if first and not self._held:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this block no signal raises; at its end the first one does."""
        heard, self._held = self._heard, True
        try:
            yield
        finally:
            self._held = False
        if self._heard and not heard:
            raise KeyboardInterrupt
