"""A launch and copies one behind the other in two streams, in single calls of a driver."""

from __future__ import annotations

from poolwright.runtime.driver import Driver, Event, Launch, Stream
from poolwright.runtime.native import Rows


def relay(
    driver: Driver,
    launch: Launch,
    kernels: Stream,
    grid: int,
    copies: Stream,
    rows: Rows,
    inward: bool,
    free: Event | None,
    told: bool,
) -> Event | None:
    """`Driver.relay`, by the other calls of a driver."""
    host, slot, sizes = (rows.row(number) for number in range(3))
    if inward:
        if free is not None:
            driver.wait(copies, free)
        driver.copy(slot, host, sizes, copies, inward)
        driver.follow(kernels, copies)
        launch(kernels, grid)
        return driver.record(kernels) if told else None
    if free is not None:
        driver.wait(kernels, free)
    launch(kernels, grid)
    driver.follow(copies, kernels)
    driver.copy(host, slot, sizes, copies, inward)
    return driver.record(copies) if told else None
