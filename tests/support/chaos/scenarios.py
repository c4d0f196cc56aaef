"""The table of scenarios: each fault, with each backend and runner that it can happen to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NETWORK = ("redis", "s3")
EVERY = ("file", *NETWORK)
RUNNERS = ("thread", "process")


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: of the context manager of :mod:`support.chaos.places` that makes it.
        title: for people.
        made_by: how it is made, in a sentence.
        backends: those that it can happen to.
        shows: the states of the tier that it must lead to, as ``kvtier top`` names them; others
            may come too.
        counted: a regular expression; one of the counters that grow during the fault fits.
        destroys: true if the medium loses what was stored.
        purges: true if the host pool loses it too.
        fills: true if the medium has no room, so that a chunk may be refused.
        runners: those that it can happen to.
    """

    name: str
    title: str
    made_by: str
    backends: tuple[str, ...]
    shows: frozenset[str]
    counted: str
    destroys: bool = False
    purges: bool = False
    fills: bool = False
    runners: tuple[str, ...] = RUNNERS


_NONE: frozenset[str] = frozenset()
_READ, _WRITE, _SLOW = (frozenset({state}) for state in ("no reads", "no stores", "slow"))
_NO_ANSWER = r"failures\.\w+\.(unavailable|timeout)"

FAULTS = (
    Fault("nothing", "none", "nothing happens; what is measured is the load", EVERY, _NONE, r""),
    Fault(
        "server_killed",
        "server killed",
        "SIGKILL; at its end the server is started again with what it had stored (Redis with its "
        "append-only file, S3 with its directory)",
        NETWORK,
        _READ | _WRITE,
        _NO_ANSWER,
    ),
    Fault(
        "server_frozen",
        "server frozen",
        "SIGSTOP: the system accepts for it, and nothing answers; at its end SIGCONT",
        NETWORK,
        _READ | _SLOW,
        _NO_ANSWER,
    ),
    Fault(
        "server_emptied",
        "server restarted empty",
        "SIGKILL, and what it had stored is removed; at its end it is started again",
        NETWORK,
        _READ | _WRITE,
        _NO_ANSWER,
        destroys=True,
    ),
    Fault(
        "body_cut",
        "body cut",
        "a proxy closes each connection after 20,000 bytes of replies, in the middle of a chunk",
        NETWORK,
        _NONE,
        r"failures\.load\.unavailable",
    ),
    Fault(
        "slow_link",
        "1 MB/s link",
        "a proxy carries 1 MB/s, both directions together",
        NETWORK,
        _NONE,
        r"failures|dropped|misses\.(timeout|unavailable)",
    ),
    Fault(
        "directory_removed",
        "directory removed",
        "`rm -rf` of the tier's root under load",
        ("file",),
        _NONE,
        r"evicted|failures\.load\.not_found|tier\.absent",
        destroys=True,
    ),
    Fault(
        "root_planted",
        "directory made anew by another user",
        "another user's directory takes the place of the tier's root, with all its chunks changed "
        "and their digests made to fit; at its end it is removed",
        ("file",),
        _READ | _WRITE,
        r"failures\.\w+\.auth",
        destroys=True,
    ),
    Fault(
        "read_only",
        "read-only file system",
        "a FUSE file system refuses every change with EROFS",
        ("file",),
        _WRITE,
        r"failures\.store\.auth",
    ),
    Fault(
        "io_errors",
        "I/O errors",
        "a FUSE file system refuses every call with EIO",
        ("file",),
        _READ | _WRITE,
        r"failures\.\w+\.unavailable",
    ),
    Fault(
        "file_system_full",
        "full file system",
        "the rest of a tmpfs is filled with a file",
        ("file",),
        _NONE,
        r"evicted",
        fills=True,
    ),
    Fault(
        "inodes_used_up",
        "no inode left",
        "empty files take the last inodes of a tmpfs, which still shows free space",
        ("file",),
        _NONE,
        r"evicted",
        fills=True,
    ),
    Fault(
        "writes_frozen",
        "frozen file system",
        "`fsfreeze` of an ext4 on a loop device: writes hang in the kernel, and reads do not",
        ("file",),
        _SLOW,
        r"dropped\.store",
    ),
    Fault(
        "file_system_hung",
        "file system that does not answer",
        "SIGSTOP of the process behind a FUSE file system: every call hangs in the kernel",
        ("file",),
        _READ | _SLOW,
        r"failures\.\w+\.timeout",
    ),
    Fault(
        "clock_behind",
        "wall clock back an hour",
        "the clock of engine and tier says an hour less; at its end it is right again",
        EVERY,
        _NONE,
        r"",
    ),
    Fault(
        "child_killed",
        "tier's process killed",
        "SIGKILL of the tier's process; the runner restarts it",
        EVERY,
        _READ | _WRITE,
        r"\.unavailable",
        runners=("process",),
    ),
    Fault(
        "model_deleted",
        "model deleted",
        "`kvtier tier rm --model` of the engine's own model, with its admin socket; the engine "
        "goes on",
        EVERY,
        _NONE,
        r"absent",
        destroys=True,
        purges=True,
    ),
    Fault(
        "second_model",
        "second model, killed and deleted",
        "another engine with another model stores chunks with the same keys in the tier; SIGKILL; "
        "at its end it is started again, gets back what it has stored, and is deleted with "
        "`kvtier tier rm`",
        EVERY,
        _NONE,
        r"",
    ),
)


@dataclass(frozen=True)
class Scenario:
    """A fault that happens to a tier of a backend, under a runner."""

    fault: Fault
    backend: str
    runner: str

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.backend}-{self.runner}"


def scenarios() -> Iterator[Scenario]:
    """Yield the whole table, fault by fault."""
    for fault in FAULTS:
        for backend in fault.backends:
            for runner in fault.runners:
                yield Scenario(fault, backend, runner)
