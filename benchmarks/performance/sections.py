"""The sections of the report: their benchmarks, plots, tables and conclusions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from results import Series, figure, gain, is_rate

from performance.figures import Figures, median


@dataclass(frozen=True)
class Run:
    name: str
    command: str  # the benchmark's file and options; the trace's path replaces ``{trace}``
    quick: str  # the command of a short run
    rounds: int = 0  # the default for ``--rounds``; 0 for a benchmark without this option
    engine: str = ""  # the engine whose environment the run needs
    vllm: Sequence[str] = ()  # ways that can be measured only in vLLM's environment
    needs_trace: bool = False


class Way(NamedTuple):
    """A measured program, with its colour and its names in plots and tables."""

    role: str  # kvtier, variant (kvtier with other options), vllm, client or limit
    name: str  # in the figures
    label: str = ""  # on the page, if it differs from the name

    @property
    def shown(self) -> str:
        return self.label or self.name


@dataclass(frozen=True)
class Panel:
    """One part of a section's plot, and its rows in the table."""

    title: str
    run: str
    group: str
    quantity: str
    axis: str  # the axis's label, with the unit
    ways: Sequence[Way]  # the first is kvtier, shown with ratios to peers and limits
    cases: Sequence[str] = ()  # if empty, all measured cases
    start: float = 0.0  # start of the axis and its bars
    glance: Mapping[str, str] = field(default_factory=dict)  # each case's text in "At a glance"

    @property
    def better(self) -> str:
        return "more" if is_rate(self.quantity) else "less"

    def find(self, figures: Figures, case: str, way: str) -> Series | None:
        return figures.find(self.run, self.group, case, way, self.quantity)


@dataclass(frozen=True)
class Section:
    name: str  # also the name of the section's file, and the value for ``--only``
    title: str
    question: str  # names the measured quantity and the compared programs
    runs: Sequence[Run]
    panels: Sequence[Panel] = ()  # if empty, the page only links to the figures
    # Sentences with placeholders, in which ``panel`` is an index. ``{panel:case:way}`` becomes the
    # median of the way, and ``{panel:case:way:peer}`` becomes the ratio of the way to the peer.
    # ``{run:least:way:peer}`` becomes the smallest ratio in the run, and ``{run:most:way:peer}``
    # becomes the largest ratio.
    answer: Sequence[str] = ()
    columns: int = 2  # panels side by side in the plot

    def is_drawn(self, figures: Figures) -> bool:
        return bool(self.panels) and any(run.series for run in figures.runs.values())

    def said(self, figures: Figures) -> str:
        """Return the answer with its figures; leave out each sentence that lacks a figure."""
        said = []
        for sentence in self.answer:
            parts: list[str | None] = [*re.split(r"\{(.+?)\}", sentence)]
            parts[1::2] = [_value(figures, self.panels, one or "") for one in parts[1::2]]
            said.append("".join(one or "" for one in parts) if None not in parts else "")
        return " ".join(filter(None, said))

    def legend(self) -> dict[str, str]:
        """Map each role to the names of all programs with this role."""
        names: dict[str, dict[str, None]] = {}
        for way in (way for panel in self.panels for way in panel.ways):
            names.setdefault(way.role, {})[way.shown.replace("`", "")] = None
        joined = {role: ", ".join(of) for role, of in names.items()}
        return {
            role: f"limit: {of}" if role == "limit" != of else of for role, of in joined.items()
        }


def _value(figures: Figures, panels: Sequence[Panel], wanted: str) -> str | None:
    where, case, *ways = wanted.split(":")
    if not where.isdecimal():
        groups = dict.fromkeys(one.group for one in figures.series(where))
        ratios = [
            own.relative_to(peer).median
            for group in groups
            for place in figures.cases(where, group, "hit rate")
            for own, peer in [[figures.find(where, group, place, way, "hit rate") for way in ways]]
            if own and peer and all(peer.values)
        ]
        return figure({"least": min, "most": max}[case](ratios)) if ratios else None
    series = [panels[int(where)].find(figures, case, way) for way in ways]
    return gain(*series) if len(series) == 2 else median(series[0])


def label(case: str) -> str:
    """Return the text for a case. The case ``all`` has an empty text."""
    return "" if case == "all" else case


_CHUNKS = ("store 2 MiB", "load 2 MiB", "store 128 KiB", "load 128 KiB")
_KVTIER = Way("kvtier", "kvtier")


# --- first token ------------------------------------------------------------------------------

_TOKEN = ("engines", "2,048 tokens")
_VLLM_FILES = "vLLM's file tier"
_OUR_TIER, _OUR_MANAGER = "kvtier (a), our tier", "kvtier (b), our manager"


FIRST_TOKEN = Section(
    "first-token",
    "The first token of a prompt seen before",
    "A prompt of 2,048 tokens is served by real engines on the CPU; its chunks are in files, and "
    "in no memory.",
    [Run("engines", "first_token.py", "first_token.py --layers 4", 9, "vLLM")],
    [
        Panel(
            "",
            *_TOKEN,
            "time to first token",
            "milliseconds",
            [
                Way("kvtier", _OUR_MANAGER, "kvtier, its manager"),
                Way("variant", _OUR_TIER, "kvtier's tier, vLLM's manager"),
                Way("vllm", _VLLM_FILES, "vLLM's file tier"),
            ],
            ["from files", "disk alone"],
            glance={"from files": "the same"},
        )
    ],
    [
        "Computing the prompt takes {0:computed:kvtier (b), our manager}. With kvtier the first "
        "token is there after {0:from files:kvtier (b), our manager}; vLLM's own file tier needs "
        "{0:from files:kvtier (b), our manager:vLLM's file tier} times as long. Four threads that "
        "only read the same files take {0:disk alone:kvtier (b), our manager}."
    ],
    columns=1,
)


# --- scheduler --------------------------------------------------------------------------------

_BUSY = ("cost", "8 at a time")


SCHEDULER = Section(
    "scheduler",
    "The engine's own thread",
    "An engine calls the manager on the thread that also schedules its steps; what the manager "
    "takes there, each step waits for. All sides get the calls of vLLM's connector, in one order.",
    [
        Run(
            "cost",
            "scheduler.py {trace} --concurrency 8",
            "scheduler.py {trace} --concurrency 8 --requests 100",
            5,
            vllm=["vLLM, at once", "vLLM, thread"],
        )
    ],
    [
        Panel(
            "CPU a chunk, all calls",
            *_BUSY,
            "CPU a chunk",
            "microseconds",
            [
                Way("kvtier", "memory tier", "kvtier"),
                Way("variant", "memory tier, lru", "kvtier, `lru`"),
                Way("limit", "no tier"),
                Way("vllm", "vLLM, at once"),
                Way("client", "vLLM, thread", "vLLM, threads"),
            ],
            ["all"],
            glance={"all": "the engine's thread, per chunk, with a tier that answers at once"},
        ),
        Panel(
            "a call beside a saturated file tier",
            *_BUSY,
            "a call",
            "microseconds, wall",
            [Way("kvtier", "file tier", "kvtier"), Way("limit", "no tier")],
        ),
    ],
    [
        "The manager takes {0:all:memory tier} of the engine's thread for each chunk, and "
        "{0:all:memory tier, lru} with the policy `lru` in place of `returns`, the default.",
        "vLLM's takes {0:all:vLLM, at once} with a tier that answers at once, as no store does, "
        "{0:all:memory tier:vLLM, at once} times ours. With one behind threads, as its own tiers "
        "work, it takes {0:all:vLLM, thread}: {0:all:memory tier:vLLM, thread} times.",
    ],
)


# --- files ------------------------------------------------------------------------------------

_FILE = "backends.py --backend file"
_UNDIGESTED = Way("variant", "kvtier, no digests", "without digests")
_COMPILED = Way("limit", "compiled part", "limit with digests")


FILES = Section(
    "files",
    "Chunks in files",
    "Four requests at a time store and load the same chunks in every way. The limit is `preadv` "
    "and `pwritev` of the same bytes in four threads, with a rename for each store; the limit with "
    "digests is the tier's compiled part alone. On the disk all go past the page cache. On a full "
    "disk each store removes another chunk.",
    [
        Run(name, f"{_FILE} {full}", f"{_FILE} {quick}", 9, vllm=["vllm.fs_io_C"])
        for name, full, quick in (
            # Keep files between the rounds, because ext4 is slow for a while after many removals.
            ("disk", "--total 64MiB --keep", "--total 16MiB --keep"),
            ("full", "--total 128MiB --full", "--total 16MiB --full"),
            ("tmpfs", "--root /dev/shm", "--root /dev/shm --total 32MiB"),
        )
    ],
    [
        Panel(
            title,
            run,
            "file",
            "throughput",
            "MiB/s",
            [
                _KVTIER,
                *without,
                Way("vllm", "vllm.fs_io_C", "vLLM's C extension"),
                *with_digests,
                Way("limit", "preadv/pwritev", "limit"),
            ],
            cases,
            glance={case: f"chunks in files on {where}: {case}" for case in glance},
        )
        for title, run, where, cases, glance, without, with_digests in (
            ("disk", "disk", "a disk", _CHUNKS, _CHUNKS[:2], [_UNDIGESTED], [_COMPILED]),
            ("full disk", "full", "a full disk", _CHUNKS[::2], (), [], []),
            ("tmpfs", "tmpfs", "tmpfs", _CHUNKS, _CHUNKS[:2], [_UNDIGESTED], [_COMPILED]),
        )
    ],
    [
        "A tier that is full stores chunks of 2 MiB at {1:store 2 MiB:kvtier:vllm.fs_io_C}, and of "
        "128 KiB at {1:store 128 KiB:kvtier:vllm.fs_io_C}, of the rate of vLLM's C extension, for "
        "which another file is removed each time. With room left, chunks of 2 MiB are stored at "
        "{0:store 2 MiB:kvtier:vllm.fs_io_C} and loaded at {0:load 2 MiB:kvtier:vllm.fs_io_C} of "
        "its rate; in memory (tmpfs), which is faster than any disk, at "
        "{2:store 2 MiB:kvtier:vllm.fs_io_C} and {2:load 2 MiB:kvtier:vllm.fs_io_C}. kvtier makes "
        "and checks digests, and it does not."
    ],
)


# --- network ----------------------------------------------------------------------------------

#: The title, the client and the limit of each backend.
_STORES = {
    "redis": ("Redis", "redis-py", "redis-benchmark"),
    "s3": ("S3", "obstore", "bare sockets"),
    "mooncake": ("Mooncake", "two buffers", "one buffer"),
}


NETWORK = Section(
    "network",
    "Redis, S3 and Mooncake",
    "Each tier is called as its runner calls it, four batches at a time, beside the usual client "
    "of its store and the limit, over the loopback of one machine.",
    [
        Run(name, command, f"{command} --total 16MiB", 9)
        for name, command in ((name, f"backends.py --backend {name}") for name in _STORES)
    ],
    [
        Panel(
            title,
            name,
            name,
            "throughput",
            "MiB/s",
            [_KVTIER, Way("client", client), Way("limit", limit)],
            _CHUNKS,
        )
        for name, (title, client, limit) in _STORES.items()
    ],
    [
        "Loads of 2 MiB beside the usual client: Redis {0:load 2 MiB:kvtier:redis-py} times "
        "(redis-py), S3 {1:load 2 MiB:kvtier:obstore} times (obstore), Mooncake "
        "{2:load 2 MiB:kvtier:two buffers} times (two buffers)."
    ],
    columns=3,
)


# --- steps ------------------------------------------------------------------------------------


STEPS = Section(
    "steps",
    "The engine's steps beside a tier at work",
    "A thread plays the engine, with steps of Python and small calls of torch, while a tier stores "
    "and loads. The limit is the same load from another program, unknown to the engine.",
    [
        Run(
            "steps",
            "interference.py",
            "interference.py --mbps 300 --seconds 1",
            3,
        )
    ],
    [
        Panel(
            f"{title}, {quantity}",
            "steps",
            tier,
            quantity,
            "times a step without the load",
            [
                Way("kvtier", "process", "process (default)"),
                Way("variant", "thread"),
                Way("limit", "apart", "another program"),
            ],
            start=1.0,
        )
        for tier, title in (("file", "files"), ("redis", "Redis"))
        for quantity in ("p50", "p99")
    ],
    [
        "While the file tier moves 300 MB/s, the median step takes {0:300 MB/s:process} times as "
        "long as without it and the p99 {1:300 MB/s:process} times; beside Redis it is "
        "{2:300 MB/s:process} and {3:300 MB/s:process}."
    ],
)


# --- worker -----------------------------------------------------------------------------------


WORKER = Section(
    "worker",
    "Copies between device and host",
    "The worker copies pages of KV tensors into slots and back; here both are CPU memory. The "
    "limit is `torch.Tensor.copy_` of as many bytes in one piece.",
    [
        Run(
            "copies",
            "worker.py --layers 1 --pages 16,256,4096",
            "worker.py --layers 1 --pages 16,256 --max-mib 512",
            9,
        )
    ],
    [
        Panel(
            operation,
            "copies",
            operation,
            "throughput",
            "GB/s",
            [
                Way("kvtier", "scattered", "scattered pages"),
                Way("variant", "contiguous", "neighbours"),
                Way("limit", "copy_", "one copy"),
            ],
            [f"256 x {kib} KiB" for kib in (16, 128, 2048)],
        )
        for operation in ("store", "load")
    ],
    [
        "Loads of 256 scattered pages reach {1:256 x 16 KiB:scattered:copy_} of one contiguous "
        "copy at 16 KiB a page, and {1:256 x 2048 KiB:scattered:copy_} at 2 MiB."
    ],
)


# --- hit rates --------------------------------------------------------------------------------


HIT_RATES = Section(
    "hit-rates",
    "Hits of the host pool",
    "A trace (its second half) and generated workloads are played against pools of several sizes; "
    "what is not hit is computed again. `lru` and `arc` are vLLM's policies. The limit is the "
    "offline optimum, which knows the future.",
    [
        Run("trace", *["policies.py --trace {trace}"] * 2, needs_trace=True),
        Run("workloads", "policies.py", "policies.py --requests 400"),
    ],
    [
        Panel(
            "trace, second half",
            "trace",
            "trace, second half",
            "hit rate",
            "% of the chunks",
            [
                Way("kvtier", "returns", "`returns`"),
                Way("vllm", "lru", "`lru`"),
                Way("client", "arc", "`arc`"),
                Way("limit", "optimum", "offline optimum"),
            ],
            glance={"2,000 slots": "hits of a trace, with room for 2,000 chunks"},
        )
    ],
    [
        "With room for 2,000 chunks of the trace {0:2,000 slots:returns} of the chunks hit, "
        "{0:2,000 slots:returns:lru} times as many as with `lru`; no policy could reach more than "
        "{0:2,000 slots:optimum}.",
        "On generated workloads it is {workloads:least:returns:lru} to "
        "{workloads:most:returns:lru} times `lru`.",
    ],
    columns=1,
)


AGENTS = Section(
    "agents",
    "Hits of agents' sessions",
    "The default policy is told more and more about a trace of agents: nothing; why each answer "
    "ended; when the next turn comes, first wrong by a factor of e^N(0,1), then exactly.",
    [Run("trace", *["policies.py --told --trace {trace}"] * 2, needs_trace=True)],
    [
        Panel(
            "",
            "trace",
            "told",
            "hit rate",
            "% of the chunks",
            [
                Way("kvtier", "rough times"),
                *(Way("variant", told) for told in ("exact times", "why answers end", "nothing")),
                Way("client", "lru", "`lru`, nothing"),
                Way("limit", "optimum", "offline optimum"),
            ],
        )
    ],
    ["Rough times bring {0:2,048 slots:rough times:lru} times the hits of `lru`."],
    columns=1,
)


# --- scale ------------------------------------------------------------------------------------

SCALE = Section(
    "scale",
    "Many slots, chunks, tiers and requests",
    "Bytes and times of an operation should stay as they are when the numbers grow. Times are "
    "CPU time of the calling thread, but for the start of the file tier: there they are wall time.",
    [
        Run(
            "growth",
            "scale.py",
            "scale.py --slots 10000 100000 --tiers 1 4 --requests 1000 --files 50000",
        )
    ],
)


# --- engines' own storage -----------------------------------------------------------------------


def _engine_section(
    engine: str,
    mib: int,
    title: str,
    question: str,
    groups: Mapping[str, tuple[str, Sequence[Way]]],
    *cases: str,
) -> Section:
    name = engine.lower()
    command = f"engine_storage.py {name} --mib {mib}"
    return Section(
        name,
        title,
        f"{question} The order is random, and each round has new bytes, all of which are compared; "
        "after each turn the files of every one are unlinked alike, and what is dirty is written "
        "back. A file is written and removed before each store, because the host of a virtual "
        "machine gives free pages slowly. kvtier makes and checks digests, and the others do not.",
        [Run(name, command, f"{command} --mib 16", 15, engine)],
        [
            Panel(
                f"{where}, {what}",
                name,
                group,
                quantity,
                axis,
                ways,
                glance={case: f"{engine}'s task, {where}: {case}" for case in shown},
            )
            for group, (where, ways) in groups.items()
            for quantity, what, axis, shown in (
                ("throughput", "wall time", "MiB/s", cases),
                ("per CPU second", "CPU", "GiB a CPU second", ()),
            )
        ],
    )


_PROCESS = Way("kvtier", "kvtier")
_NATIVE = Way("client", "fs_native", "`fs_native`")

LMCACHE = _engine_section(
    "LMCache",
    128,
    "Beside LMCache's own adapters",
    "Each adapter gets tasks of 128 MiB in objects of 2 MiB, over one L1 in shared memory. A load "
    "finds the bytes in the page cache, or past it on the disk (`O_DIRECT`).",
    {
        "file": (
            "page cache",
            [_PROCESS, _UNDIGESTED, Way("client", "fs", "`fs`"), _NATIVE, _COMPILED],
        ),
        "disk": ("disk", [_PROCESS, _UNDIGESTED, _NATIVE, _COMPILED]),
        "redis": ("Redis", [_PROCESS, Way("client", "resp", "`resp`")]),
    },
    "store",
    "load",
)

SGLANG = _engine_section(
    "SGLang",
    64,  # the host pool's size
    "Beside SGLang's own storage",
    "Each storage gets batches of pages of 2 MiB by the functions that SGLang's storage threads "
    "call. A load finds the bytes in the page cache.",
    {
        "file": (
            "page cache",
            [
                Way("kvtier", "kvtier", "kvtier in place"),
                Way("variant", "kvtier, process", "kvtier in a process"),
                Way("variant", "kvtier, layer_first", "kvtier, `layer_first`"),
                Way("client", "file", "`file`"),
                Way("client", "file, layer_first", "`file`, `layer_first`"),
            ],
        )
    },
)

SECTIONS = {
    section.name: section
    for section in (
        *(FIRST_TOKEN, SCHEDULER, HIT_RATES, AGENTS, FILES, NETWORK, STEPS, WORKER),
        *(LMCACHE, SGLANG, SCALE),
    )
}
