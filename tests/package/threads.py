"""Work in other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_threads(count: int, work: Callable[[], None]) -> None:
    """Do it in as many threads, which begin together; the first error of any is raised here."""
    together = threading.Barrier(count)

    def begin() -> None:
        together.wait()
        work()

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(begin) for _ in range(count)]:
            future.result()


def in_another_thread(work: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
