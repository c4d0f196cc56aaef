from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

NETWORK = ("redis", "s3")
EVERY = ("file", *NETWORK)
RUNNERS = ("thread", "process")


@dataclass(frozen=True)
class Fault:
    name: str
    title: str
    made_by: str  # how the fault is made, for the page with the results
    shows: frozenset[str] = frozenset()  # the states that ``kvtier top`` must show
    counted: str = ""  # a regular expression for a counter that must grow
    backends: tuple[str, ...] = EVERY
    destroys: bool = False  # the medium loses all chunks
    purges: bool = False  # the host pool loses all chunks too
    fills: bool = False  # the medium is full, and may refuse chunks
    runners: tuple[str, ...] = RUNNERS


_READ, _WRITE, _SLOW = (frozenset({state}) for state in ("no reads", "no stores", "slow"))
_of_servers, _of_files = partial(Fault, backends=NETWORK), partial(Fault, backends=("file",))
_NO_ANSWER = r"failures\.\w+\.(unavailable|timeout)"

FAULTS = (
    Fault("nothing", "none", "nothing happens; what is measured is the load"),
    _of_servers(
        "server_killed",
        "server killed",
        "SIGKILL; at its end the server is started again with what it had stored (Redis with its "
        "append-only file, S3 with its directory)",
        _READ | _WRITE,
        _NO_ANSWER,
    ),
    _of_servers(
        "server_frozen",
        "server frozen",
        "SIGSTOP: the system accepts for it, and nothing answers; at its end SIGCONT",
        _READ | _SLOW,
        _NO_ANSWER,
    ),
    _of_servers(
        "server_emptied",
        "server restarted empty",
        "SIGKILL, and what it had stored is removed; at its end it is started again",
        _READ | _WRITE,
        _NO_ANSWER,
        destroys=True,
    ),
    _of_servers(
        "body_cut",
        "body cut",
        "a proxy closes each connection after 20,000 bytes of replies, in the middle of a chunk",
        counted=r"failures\.load\.unavailable",
    ),
    _of_servers(
        "slow_link",
        "1 MB/s link",
        "a proxy carries 1 MB/s, both directions together",
        counted=r"failures|dropped|misses\.(timeout|unavailable)",
    ),
    _of_files(
        "directory_removed",
        "directory removed",
        "`rm -rf` of the tier's root under load",
        counted=r"evicted|failures\.load\.not_found|tier\.absent",
        destroys=True,
    ),
    _of_files(
        "root_planted",
        "directory made anew by another user",
        "another user's directory takes the place of the tier's root, with all its chunks changed "
        "and their digests made to fit; at its end it is removed",
        _READ | _WRITE,
        r"failures\.\w+\.auth",
        destroys=True,
    ),
    _of_files(
        "read_only",
        "read-only file system",
        "a FUSE file system refuses every change with EROFS",
        _WRITE,
        r"failures\.store\.auth",
    ),
    _of_files(
        "io_errors",
        "I/O errors",
        "a FUSE file system refuses every call with EIO",
        _READ | _WRITE,
        r"failures\.\w+\.unavailable",
    ),
    _of_files(
        "file_system_full",
        "full file system",
        "the rest of a tmpfs is filled with a file",
        counted=r"evicted",
        fills=True,
    ),
    _of_files(
        "inodes_used_up",
        "no inode left",
        "empty files take the last inodes of a tmpfs, which still shows free space",
        counted=r"evicted",
        fills=True,
    ),
    _of_files(
        "writes_frozen",
        "frozen file system",
        "`fsfreeze` of an ext4 on a loop device: writes hang in the kernel, and reads do not",
        _SLOW,
        r"dropped\.store",
    ),
    _of_files(
        "file_system_hung",
        "file system that does not answer",
        "SIGSTOP of the process behind a FUSE file system: every call hangs in the kernel",
        _READ | _SLOW,
        r"failures\.\w+\.timeout",
    ),
    Fault(
        "clock_behind",
        "wall clock back an hour",
        "the clock of engine and tier says an hour less; at its end it is right again",
    ),
    Fault(
        "child_killed",
        "tier's process killed",
        "SIGKILL of the tier's process; the runner restarts it",
        _READ | _WRITE,
        r"\.unavailable",
        runners=("process",),
    ),
    Fault(
        "model_deleted",
        "model deleted",
        "`kvtier tier rm --model` of the engine's own model, with its admin socket; the engine "
        "goes on",
        counted=r"absent",
        destroys=True,
        purges=True,
    ),
    Fault(
        "second_model",
        "second model, killed and deleted",
        "another engine with another model stores chunks with the same keys in the tier; SIGKILL; "
        "at its end it is started again, gets back what it has stored, and is deleted with "
        "`kvtier tier rm`",
    ),
)


@dataclass(frozen=True)
class Scenario:
    fault: Fault
    backend: str
    runner: str

    def __str__(self) -> str:
        return f"{self.fault.name}-{self.backend}-{self.runner}"


def scenarios() -> Iterator[Scenario]:
    for fault in FAULTS:
        for backend in fault.backends:
            for runner in fault.runners:
                yield Scenario(fault, backend, runner)


@dataclass
class Outcome:
    scenario: Scenario
    requests: int = 0
    compared_bytes: int = 0
    stored: int = 0
    wrong_bytes: int = 0
    # Announced chunks that fail to load, except chunks announced before the medium was destroyed.
    lost: int = 0
    late_retries: int = 0  # lookups still pending after their deadline
    revived: int = 0  # chunks served after they had been deleted everywhere
    restored: int = 0  # chunks stored before the fault, and again after its start
    refused: int = 0  # chunks that the admission rule kept out of the tier
    broken: list[str] = field(default_factory=list)
    # The states that the tier showed, each with the seconds since the fault began.
    shown: dict[str, float] = field(default_factory=dict)
    # Seconds from the fault's end to each kind of recovery; ``None`` if the tier did not recover.
    closed_s: float | None = None
    loaded_s: float | None = None
    stored_s: float | None = None
    grown: dict[str, int] = field(default_factory=dict)
    # Pins, slots, requests and jobs still held at the end; all must be 0.
    left_over: dict[str, int] = field(default_factory=dict)
    # Wall time and name of the longest call on the engine's thread.
    stall_us: float = 0.0
    stall_in: str = ""
    stall_cpu_us: float = 0.0  # the longest processor time of a call
    wait_s: float = 0.0  # the longest wait of a request for the tier

    @property
    def recovery(self) -> dict[str, float | None]:
        return {"asked": self.closed_s, "served": self.loaded_s, "stored": self.stored_s}

    def breaches(self) -> list[str]:
        fault = self.scenario.fault
        found = [*self.broken]
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} wrong bytes")
        if self.lost:
            found.append(f"{self.lost} of {self.stored} stored chunks lost")
        if self.late_retries:
            found.append(f"{self.late_retries} lookups pending after their deadline")
        if fault.purges and self.revived:
            found.append(f"{self.revived} deleted chunks served")
        if fault.destroys and not self.restored:
            found.append("nothing stored a second time")
        if self.refused and not fault.fills:
            found.append(f"{self.refused} chunks refused by a tier with room")
        if not fault.shows <= self.shown.keys():
            found.append(f"shown {sorted(self.shown)}, not {sorted(fault.shows)}")
        never = [what for what, after_s in self.recovery.items() if after_s is None]
        found += [f"never {what} again" for what in never]
        if not re.search(fault.counted, " ".join(self.grown)):
            found.append(f"not counted: {self.grown}")
        found += [f"{count} {what} left over" for what, count in self.left_over.items() if count]
        return found
