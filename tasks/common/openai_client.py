"""The `openai` package's client, for services that may be slow, broken or hostile."""

import re
import time
from collections.abc import Iterator

import httpx

MOST_BYTES = 8_000_000  # of a reply
_ADDRESS = re.compile(r"https?://(?:[\w.-]+|\[[\da-fA-F:.]+\])(?::\d{1,5})?(?:/[^\s?#@]*)?")


def address_problem(url: str, key: str) -> str:
    """Why ``url`` is no base URL of a service; empty where it is one. ``key``: the variable that its key goes into. The
    words leave the URL out, which may hold a password."""
    return "" if _ADDRESS.fullmatch(url) else f"must be http(s)://host/path; a key goes into {key}"


class _Bounded(httpx.SyncByteStream):
    """A reply's bytes: at most MOST_BYTES of them, and none after ``ends`` (time.monotonic)."""

    def __init__(self, stream: httpx.SyncByteStream, ends: float):
        self.stream, self.ends = stream, ends

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for part in self.stream:
            size += len(part)
            if size > MOST_BYTES:
                raise httpx.ReadError(f"the reply has more than {MOST_BYTES:,} bytes")
            if time.monotonic() > self.ends:
                raise httpx.ReadTimeout("the reply does not end")
            yield part

    def close(self) -> None:
        self.stream.close()


class _Transport(httpx.HTTPTransport):
    """httpx limits the pause between two parts of a reply, not the reply: neither its time nor its size."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        ends = time.monotonic() + self.seconds
        response = super().handle_request(request)
        if "content-encoding" in response.headers:  # nobody asked for it, and what it unpacks to has no limit
            response.close()
            raise httpx.ReadError("the reply is compressed")
        response.stream = _Bounded(response.stream, ends)
        return response


def openai_client(url: str, key: str, seconds: float, retries: int):
    """The client of the service at ``url``. A reply takes at most ``seconds``; no redirect takes the key elsewhere."""
    from openai import OpenAI  # takes a second, which others need not wait

    http = httpx.Client(
        transport=_Transport(seconds), timeout=seconds, follow_redirects=False, headers={"Accept-Encoding": "identity"}
    )
    # Empty, not None, which would take what is meant for another service from the environment.
    return OpenAI(
        base_url=url, api_key=key or "none", organization="", project="", max_retries=retries, http_client=http
    )
