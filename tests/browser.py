"""`make monitor` in a headless Chromium (test_end_to_end.py).

As a program it takes the pictures of docs/MONITORING.md: python -m tests.browser ARTIFACTS docs/images
"""

import contextlib
import csv
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import MAKE, ROOT, outside_make

SECONDS = 120  # for the dashboard to start, and for what a page is to show


def path() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def monitor(artifacts: Path) -> Iterator[tuple]:
    """The address of `make monitor` on ``artifacts``, and a page of a browser."""
    from playwright.sync_api import sync_playwright

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*MAKE, "monitor", f"PORT={port}", f"ARTIFACTS={artifacts}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=outside_make(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("trackio: http://127.0.0.1:"), line + process.stdout.read()
            with sync_playwright() as playwright:
                # A container's root may have no user namespaces for Chromium's sandbox; the pages are our own.
                options = ["--no-sandbox"] if os.getuid() == 0 else []
                chromium = playwright.chromium.launch(executable_path=path(), args=options)
                page = chromium.new_page(viewport={"width": 1400, "height": 900})
                page.set_default_timeout(SECONDS * 1000)
                yield f"http://127.0.0.1:{port}/", page
                chromium.close()
        finally:
            process.terminate()


def curve(page, metric: str) -> list[dict[str, str]]:
    """The points that the page draws of ``metric``, as the plot's own button gives them: a row for each."""
    plot = page.locator(f'[data-metric="{metric}"]')
    plot.scroll_into_view_if_needed()
    plot.locator("canvas").wait_for()
    plot.hover()
    with page.expect_download() as download:
        plot.get_by_title("data as a CSV file").click()
    with open(download.value.path(), newline="") as file:
        return list(csv.DictReader(file))


def take_pictures(artifacts: Path, folder: Path) -> None:
    """PNGs of some curves and of a sample in the dashboard, for docs/MONITORING.md."""
    with monitor(artifacts) as (address, page):
        page.goto(address)
        page.get_by_placeholder("e.g., loss").fill("score/mean|actor/entropy|actor/grad_norm|response_length/mean")
        page.locator('[data-metric="critic/score/mean"] canvas').wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=folder / "monitor-curves.png")
        page.goto(address + "traces")
        page.get_by_placeholder("Search traces").fill("<answer>")
        page.get_by_text("<answer>").nth(1).click()
        page.get_by_text("ground_truth").first.wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=folder / "monitor-samples.png")


if __name__ == "__main__":
    take_pictures(*map(Path, sys.argv[1:]))
