"""The sections of the report: the benchmarks they run, what they show, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from results import Series, figure

from performance.figures import Figures, median, ratio, sentence


@dataclass(frozen=True)
class Run:
    """One run of a benchmark.

    Attributes:
        name: its name within the section.
        program: the benchmark's file.
        options: of the benchmark.
        quick: options of a short run in place of these.
        rounds: default of the report's ``--rounds``; 0 for a benchmark without this option.
        seconds: rough duration with the default rounds, and of the quick run.
        engine: the engine in whose environment it runs; without that nothing can be measured.
        vllm: ways that can only be measured in vLLM's environment.
        trace: how the benchmark takes a trace: ``{}`` stands for the file; empty if it takes none.
        needs_trace: without a trace there is nothing to measure.
    """

    name: str
    program: str
    options: str
    quick: str
    rounds: int
    seconds: tuple[float, float]
    engine: str = ""
    vllm: Sequence[str] = ()
    trace: str = ""
    needs_trace: bool = False


@dataclass(frozen=True)
class Way:
    """A way to do the work, in a plot and a table.

    Attributes:
        name: its name in the figures.
        label: its name in the table.
        role: ``kvtier``, ``variant`` (kvtier otherwise), ``vllm``, ``client`` or ``limit``; its
            colour, and its place in the legend.
    """

    name: str
    label: str
    role: str


@dataclass(frozen=True)
class Panel:
    """One part of a section's plot, and its rows in the table.

    Attributes:
        title: above the part.
        run: run that it shows.
        group: group of its series; empty for a panel of each group, with its name as the title.
        quantity: quantity of its series.
        axis: what the axis shows, with its unit.
        ways: what is compared. The first is kvtier; its ratio to each peer and limit is shown.
        cases: the cases to show; all that were measured if it is empty.
        higher_is_better: for a rate.
        start: where bars start.
        tabled: the cases have rows in the table; otherwise they are in the plot alone.
        glance: cases that the table at a glance and the README show beside vLLM, with their words.
    """

    title: str
    run: str
    group: str
    quantity: str
    axis: str
    ways: Sequence[Way]
    cases: Sequence[str] = ()
    higher_is_better: bool = False
    start: float = 0.0
    tabled: bool = True
    glance: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        name: of its file, and of ``--only``.
        title: its heading.
        question: what it measures, and beside what.
        runs: the benchmarks that it runs.
        panels: parts of its plot and its table.
        answer: makes the sentence with the main figures.
        legend: names of the roles in its plot.
        columns: parts of the plot beside each other.
        lines: the cases begin with numbers, which are the places on an axis.
        grid: no plot; a table for each group with the cases as columns and the quantities as rows.
    """

    name: str
    title: str
    question: str
    runs: Sequence[Run]
    panels: Sequence[Panel]
    answer: Callable[[Figures], str]
    legend: Mapping[str, str] = field(default_factory=dict)
    columns: int = 2
    lines: bool = False
    grid: bool = False

    def is_drawn(self, figures: Figures) -> bool:
        """Return whether there is a plot."""
        return not self.grid and any(run.series for run in figures.runs.values())

    def panels_for(self, figures: Figures) -> list[Panel]:
        """Return the panels, with one for each group that was measured where none is named."""
        return [
            replace(panel, group=group, title=panel.title or group) if not panel.group else panel
            for panel in self.panels
            for group in ([panel.group] if panel.group else figures.groups(panel.run))
        ]


def label(case: str) -> str:
    """Return the name of a case in plots and tables: none where it is the only one."""
    return "" if case == "all" else case


_CHUNKS = ("store 2 MiB", "load 2 MiB", "store 128 KiB", "load 128 KiB")
_KVTIER = Way("kvtier", "kvtier", "kvtier")


# --- first token ------------------------------------------------------------------------------

_PROMPT = "2,048 tokens"
_VLLM_FILES = "vLLM's file tier"
_OUR_TIER, _OUR_MANAGER = "kvtier (a), our tier", "kvtier (b), our manager"


def _first_token(figures: Figures) -> str:
    def of(way: str, case: str = "from files") -> Series | None:
        return figures.find("engines", _PROMPT, case, way, "time to first token")

    ours, peer = of(_OUR_MANAGER), of(_VLLM_FILES)
    return sentence(
        "Computing the prompt takes {}. With kvtier the first token is there after {}; vLLM's own "
        "file tier needs {} times as long.",
        median(of(_OUR_MANAGER, "computed")),
        median(ours),
        ratio(peer, ours),
    )


FIRST_TOKEN = Section(
    "first-token",
    "The first token of a prompt seen before",
    "A prompt of 2,048 tokens is served by real engines on the CPU; its chunks are in files, and "
    "in no memory.",
    [
        Run(
            "engines",
            "first_token.py",
            "",
            "--layers 4",
            9,
            (600, 70),
            engine="vLLM",
        )
    ],
    [
        Panel(
            "",
            "engines",
            _PROMPT,
            "time to first token",
            "milliseconds",
            [
                Way(_OUR_MANAGER, "kvtier, its manager", "kvtier"),
                Way(_OUR_TIER, "kvtier's tier, vLLM's manager", "variant"),
                Way(_VLLM_FILES, "vLLM's file tier", "vllm"),
            ],
            cases=["from files"],
            glance={"from files": "first token of a prompt of 2,048 tokens, all of it in files"},
        )
    ],
    _first_token,
    {
        "kvtier": "kvtier, its manager",
        "variant": "kvtier's tier under vLLM's manager",
        "vllm": "vLLM's file tier",
    },
    columns=1,
)


# --- scheduler --------------------------------------------------------------------------------

_BUSY = "8 at a time"


def _scheduler(figures: Figures) -> str:
    def of(way: str) -> Series | None:
        return figures.find("cost", _BUSY, "all", way, "CPU a chunk")

    ours = of("memory tier")
    return " ".join(
        [
            sentence(
                "The manager takes {} of the engine's thread for each chunk, and {} with the "
                "policy `lru` in place of `prefix`.",
                median(ours),
                median(of("memory tier, lru")),
            ),
            sentence(
                "vLLM's takes {} with a tier that answers at once, as no store does, {} times "
                "ours. With one behind threads, as its own tiers work, it takes {}: {} times.",
                median(of("vLLM, at once")),
                ratio(of("vLLM, at once"), ours),
                median(of("vLLM, thread")),
                ratio(of("vLLM, thread"), ours),
            ),
        ]
    )


_MANAGERS = [
    Way("memory tier", "kvtier", "kvtier"),
    Way("memory tier, lru", "kvtier, `lru`", "variant"),
    Way("no tier", "no tier", "limit"),
    Way("vLLM, at once", "vLLM, at once", "vllm"),
    Way("vLLM, thread", "vLLM, threads", "client"),
]

SCHEDULER = Section(
    "scheduler",
    "The engine's own thread",
    "An engine calls the manager on the thread that also schedules its steps; what the manager "
    "takes there, each step waits for. All sides get the calls of vLLM's connector, in one order.",
    [
        Run(
            "cost",
            "scheduler.py",
            "--concurrency 8",
            "--concurrency 8 --requests 100",
            5,
            (240, 20),
            vllm=["vLLM, at once", "vLLM, thread"],
            trace="{}",
        )
    ],
    [
        Panel(
            "CPU a chunk, all calls",
            "cost",
            _BUSY,
            "CPU a chunk",
            "microseconds",
            _MANAGERS,
            cases=["all"],
            glance={"all": "the engine's thread, per chunk, with a tier that answers at once"},
        ),
        Panel(
            "a call beside a saturated file tier",
            "cost",
            _BUSY,
            "a call",
            "microseconds, wall",
            [
                Way("file tier", "kvtier", "kvtier"),
                Way("no tier", "no tier", "limit"),
            ],
        ),
    ],
    _scheduler,
    {
        "kvtier": "kvtier",
        "variant": "kvtier, policy lru",
        "limit": "kvtier, no tier",
        "vllm": "vLLM, answers at once",
        "client": "vLLM, behind threads",
    },
)


# --- files ------------------------------------------------------------------------------------

_FILES = [
    _KVTIER,
    Way("vllm.fs_io_C", "vLLM's C extension", "vllm"),
    Way("preadv/pwritev", "limit", "limit"),
]


def _files(figures: Figures) -> str:
    def compared(run: str, case: str) -> str | None:
        own, peer = (
            figures.find(run, "file", case, way, "throughput") for way in ("kvtier", "vllm.fs_io_C")
        )
        return ratio(own, peer)

    return sentence(
        "A tier that is full stores chunks of 2 MiB at {}, and of 128 KiB at {}, of the rate of "
        "vLLM's C extension, for which another file is removed each time. With room left, chunks "
        "of 2 MiB are stored at {} and loaded at {} of its rate; in memory (tmpfs), which is "
        "faster than any disk, at {} and {}. kvtier makes and checks digests, and it does not.",
        *(compared("full", case) for case in _CHUNKS[::2]),
        *(compared(run, case) for run in ("disk", "tmpfs") for case in _CHUNKS[:2]),
    )


FILES = Section(
    "files",
    "Chunks in files",
    "Four requests at a time store and load the same chunks in every way. The limit is `preadv` "
    "and `pwritev` of the same bytes in four threads, with a rename for each store. On the disk "
    "all go past the page cache. On a full disk each store removes another chunk.",
    [
        Run(
            "disk",
            "backends.py",
            # Files are kept between the rounds: ext4 is slow for a while after many were removed.
            "--backend file --total 64MiB --keep",
            "--backend file --total 16MiB --keep",
            9,
            (150, 15),
            vllm=["vllm.fs_io_C"],
        ),
        Run(
            "full",
            "backends.py",
            "--backend file --total 128MiB --full",
            "--backend file --total 16MiB --full",
            9,
            (60, 10),
            vllm=["vllm.fs_io_C"],
        ),
        Run(
            "tmpfs",
            "backends.py",
            "--backend file --root /dev/shm",
            "--backend file --root /dev/shm --total 32MiB",
            9,
            (60, 10),
            vllm=["vllm.fs_io_C"],
        ),
    ],
    [
        Panel(
            title,
            run,
            "file",
            "throughput",
            "MiB/s",
            _FILES,
            cases,
            higher_is_better=True,
            glance={case: f"chunks in files on {where}: {case}" for case in shown},
        )
        for title, run, where, cases, shown in (
            ("disk", "disk", "a disk", _CHUNKS, _CHUNKS[:2]),
            ("full disk", "full", "a full disk", _CHUNKS[::2], _CHUNKS[::2]),
            ("tmpfs", "tmpfs", "tmpfs", _CHUNKS, _CHUNKS[:2]),
        )
    ],
    _files,
    {
        "kvtier": "kvtier",
        "vllm": "vLLM's C extension",
        "limit": "limit: preadv, pwritev",
    },
)


# --- network ----------------------------------------------------------------------------------

_STORES = {
    "redis": ("Redis", "redis-py", "redis-py", "redis-benchmark"),
    "s3": ("S3", "obstore", "obstore", "bare sockets"),
    "mooncake": ("Mooncake", "two buffers", "two buffers", "one buffer"),
}


def _network(figures: Figures) -> str:
    parts = []
    for name, (title, client, label, _) in _STORES.items():
        for case in ("load 2 MiB",):
            own, peer = (
                figures.find(name, name, case, way, "throughput") for way in ("kvtier", client)
            )
            parts.append(sentence("{} {} times ({})", title, ratio(own, peer), label))
    said = ", ".join(filter(None, parts))
    return said and f"Loads of 2 MiB beside the usual client: {said}."


NETWORK = Section(
    "network",
    "Redis, S3 and Mooncake",
    "Each tier is called as its runner calls it, four batches at a time, beside the usual client "
    "of its store and the limit, over the loopback of one machine.",
    [
        Run(
            name,
            "backends.py",
            f"--backend {name}",
            f"--backend {name} --total 16MiB",
            9,
            (seconds, 20),
        )
        for name, seconds in (("redis", 60), ("s3", 420), ("mooncake", 120))
    ],
    [
        Panel(
            title,
            name,
            name,
            "throughput",
            "MiB/s",
            [_KVTIER, Way(client, label, "client"), Way(limit, limit, "limit")],
            _CHUNKS,
            higher_is_better=True,
        )
        for name, (title, client, label, limit) in _STORES.items()
    ],
    _network,
    {
        "kvtier": "kvtier",
        "client": "client: redis-py, obstore, Mooncake's own",
        "limit": "limit: redis-benchmark, bare sockets, one buffer a chunk",
    },
    columns=3,
)


# --- steps ------------------------------------------------------------------------------------

_RUNNERS = [
    Way("process", "process (default)", "kvtier"),
    Way("thread", "thread", "variant"),
    Way("apart", "another program", "limit"),
]


def _steps(figures: Figures) -> str:
    def of(tier: str, quantity: str) -> str | None:
        return median(figures.find("steps", tier, "300 MB/s", "process", quantity))

    return sentence(
        "While the file tier moves 300 MB/s, the median step takes {} times as long as without "
        "it and the p99 {} times; beside Redis it is {} and {}.",
        *(of(tier, quantity) for tier in ("file", "redis") for quantity in ("p50", "p99")),
    )


STEPS = Section(
    "steps",
    "The engine's steps beside a tier at work",
    "A thread plays the engine, with steps of Python and small calls of torch, while a tier stores "
    "and loads. The limit is the same load from another program, unknown to the engine.",
    [
        Run(
            "steps",
            "interference.py",
            "--tier file redis",
            "--tier file redis --mbps 300 --seconds 1",
            3,
            (400, 45),
        )
    ],
    [
        Panel(
            f"{title}, {quantity}",
            "steps",
            tier,
            quantity,
            "times a step without the load",
            _RUNNERS,
            start=1.0,
        )
        for tier, title in (("file", "files"), ("redis", "Redis"))
        for quantity in ("p50", "p99")
    ],
    _steps,
    {
        "kvtier": "kvtier in a process (default)",
        "variant": "kvtier in a thread",
        "limit": "limit: the same load from another program",
    },
)


# --- worker -----------------------------------------------------------------------------------


def _worker(figures: Figures) -> str:
    def compared(case: str) -> str | None:
        own, peer = (
            figures.find("copies", "load", case, way, "throughput")
            for way in ("scattered", "copy_")
        )
        return ratio(own, peer)

    return sentence(
        "Loads of 256 scattered pages reach {} of one contiguous copy at 16 KiB a page, and {} at "
        "2 MiB.",
        compared("256 x 16 KiB"),
        compared("256 x 2048 KiB"),
    )


WORKER = Section(
    "worker",
    "Copies between device and host",
    "The worker copies pages of KV tensors into slots and back; here both are CPU memory. The "
    "limit is `torch.Tensor.copy_` of as many bytes in one piece.",
    [
        Run(
            "copies",
            "worker.py",
            "--layers 1 --pages 16,256,4096",
            "--layers 1 --pages 16,256 --max-mib 512",
            9,
            (120, 20),
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
                Way("scattered", "scattered pages", "kvtier"),
                Way("contiguous", "neighbours", "variant"),
                Way("copy_", "one copy", "limit"),
            ],
            cases=[f"256 x {kib} KiB" for kib in (16, 128, 2048)],
            higher_is_better=True,
        )
        for operation in ("store", "load")
    ],
    _worker,
    {
        "kvtier": "kvtier, scattered pages",
        "variant": "kvtier, neighbours",
        "limit": "limit: one contiguous copy_",
    },
)


# --- hit rates --------------------------------------------------------------------------------

_SLOTS = "2,000 slots"


_TRACE = "trace, second half"


def _hit_rates(figures: Figures) -> str:
    own, peer, limit = (
        figures.find("trace", _TRACE, _SLOTS, way, "hit rate")
        for way in ("prefix", "lru", "optimum")
    )
    generated = [
        one.relative_to(other).median
        for group in figures.groups("workloads")
        for case in figures.cases("workloads", group, "hit rate")
        if (one := figures.find("workloads", group, case, "prefix", "hit rate"))
        and (other := figures.find("workloads", group, case, "lru", "hit rate"))
        and other.median
    ]
    return " ".join(
        [
            sentence(
                "With room for 2,000 chunks of the trace {} of the chunks hit, {} times as many as "
                "with `lru`; no policy could reach more than {}.",
                median(own),
                ratio(own, peer),
                median(limit),
            ),
            sentence(
                "On generated workloads it is {} to {} times `lru`.",
                *(figure(end(generated)) if generated else None for end in (min, max)),
            ),
        ]
    )


_POLICIES = [
    Way("prefix", "`prefix`", "kvtier"),
    Way("lru", "`lru`", "vllm"),
    Way("arc", "`arc`", "client"),
    Way("optimum", "offline optimum", "limit"),
]

HIT_RATES = Section(
    "hit-rates",
    "Hits of the host pool",
    "A trace (its second half) and generated workloads are played against pools of several sizes; "
    "what is not hit is computed again. `lru` and `arc` are vLLM's policies. The limit is the "
    "offline optimum, which knows the future.",
    [
        Run("trace", "policies.py", "", "", 0, (120, 60), trace="--trace={}", needs_trace=True),
        Run("workloads", "policies.py", "", "--requests 400", 0, (240, 30)),
    ],
    [
        Panel(
            "",
            run,
            "",
            "hit rate",
            "% of the chunks",
            _POLICIES,
            higher_is_better=True,
            tabled=run == "trace",
            glance={_SLOTS: "hits of a trace, with room for 2,000 chunks"}
            if run == "trace"
            else {},
        )
        for run in ("trace", "workloads")
    ],
    _hit_rates,
    {
        "kvtier": "kvtier: prefix",
        "vllm": "vLLM: lru",
        "client": "vLLM: arc",
        "limit": "limit: offline optimum",
    },
    columns=3,
    lines=True,
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
            "",
            "--slots 10000 100000 --chunks 100000 --tiers 1 4 --requests 1000 --files 50000",
            0,
            (400, 40),
        )
    ],
    [],
    lambda figures: "",
    grid=True,
)


# --- engines' own storage -----------------------------------------------------------------------


def _engine_section(
    engine: str, title: str, question: str, groups: Mapping[str, tuple[str, Sequence[Way]]]
) -> Section:
    """Return the section of a benchmark of an engine's own storages."""
    name = engine.lower()
    return Section(
        name,
        title,
        f"{question} In each round another one begins, with new random bytes, all of which are "
        "compared; after each turn the files of every one are unlinked alike, and what is dirty "
        "is written back. kvtier makes and checks digests of every byte, and the others do not.",
        [Run(name, "engine_storage.py", name, f"{name} --mib 16", 15, (300, 60), engine=engine)],
        [
            Panel(f"{where}, {what}", name, group, quantity, axis, ways, higher_is_better=True)
            for group, (where, ways) in groups.items()
            for quantity, what, axis in (
                ("throughput", "wall time", "MiB/s"),
                ("per CPU second", "CPU", "GiB a CPU second"),
            )
        ],
        lambda figures: "",
        {"kvtier": "kvtier", "variant": "kvtier, otherwise", "client": f"{engine}'s own"},
    )


_PROCESS = Way("kvtier", "kvtier in a process", "kvtier")
_THREAD = Way("kvtier, thread", "kvtier in a thread", "variant")
_NATIVE = Way("fs_native", "`fs_native`", "client")

LMCACHE = _engine_section(
    "LMCache",
    "Beside LMCache's own adapters",
    "Each adapter gets tasks of 128 MiB in objects of 2 MiB, over one L1 in shared memory. A load "
    "finds the bytes in the page cache, or past it on the disk (`O_DIRECT`).",
    {
        "file": ("page cache", [_PROCESS, _THREAD, Way("fs", "`fs`", "client"), _NATIVE]),
        "disk": ("disk", [_PROCESS, _NATIVE]),
        "redis": ("Redis", [_PROCESS, _THREAD, Way("resp", "`resp`", "client")]),
    },
)

SGLANG = _engine_section(
    "SGLang",
    "Beside SGLang's own storage",
    "Each storage gets batches of pages of 2 MiB by the functions that SGLang's storage threads "
    "call. A load finds the bytes in the page cache.",
    {
        "file": (
            "page cache",
            [
                Way("kvtier", "kvtier in place", "kvtier"),
                Way("kvtier, process", "kvtier in a process", "variant"),
                Way("kvtier, layer_first", "kvtier, `layer_first`", "variant"),
                Way("file", "`file`", "client"),
                Way("file, layer_first", "`file`, `layer_first`", "client"),
            ],
        )
    },
)

SECTIONS = {
    section.name: section
    for section in (
        FIRST_TOKEN,
        SCHEDULER,
        HIT_RATES,
        FILES,
        NETWORK,
        STEPS,
        WORKER,
        LMCACHE,
        SGLANG,
        SCALE,
    )
}
