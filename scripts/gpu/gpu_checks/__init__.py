"""The checks of a device, in order; each check is a module with a function ``check``."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """One check.

    Attributes:
        name: name of its module.
        title: its subject.
        limit_s: time limit; a check that runs longer is killed and has failed.
    """

    name: str
    title: str
    limit_s: float


CHECKS = (
    Check("machine", "versions, what the device can do, limits of this machine", 60),
    Check("registration", "registration of heap, memfd and /dev/shm memory", 60),
    Check("batch", "a batch of one run, bytes equal", 45),
    Check("device_tests", "tests/gpu", 90),
    Check("streams", "jobs after a side stream and after an event, from two threads", 45),
    Check("seam", "a merged run across a registration's end", 30),
    Check("submission", "131,072 runs submitted behind a sleeping stream", 75),
    Check("bandwidth", "GB/s by layers, page size, pages and direction", 150),
    Check("expedited", "an expedited load behind 1 GiB of others", 30),
    Check("capture", "polling while a graph is captured", 30),
    Check("dropped", "a worker dropped without shutdown", 60),
    Check("round_trip", "device -> pool -> file tier -> pool -> device", 60),
)
