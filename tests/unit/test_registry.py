from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvtier_sdk import (
    CONTRACT_VERSION,
    BackendLoadError,
    ConfigError,
    DuplicateBackendError,
    TierSpec,
    UnknownBackendError,
    __version__,
    available_backends,
    load_backend,
    load_codec,
    load_policy,
)
from kvtier_sdk.contract import CONTRACT_RELEASES
from kvtier_sdk.registry import backend_name

TIER = """
from kvtier_sdk import ChunkTierManager

class Tier(ChunkTierManager):
    contract_version = {version}
    async def contains_chunk(self, key): return False
    async def store_chunk(self, transfer): pass
    async def load_chunk(self, transfer): pass
"""
GOOD = TIER.format(version=1)

INCOMPLETE = """
from kvtier_sdk import ChunkTierManager

class Tier(ChunkTierManager):
    contract_version = 1
    async def store_chunk(self, transfer): pass
"""
WRAPPED = f"""{GOOD}
    import functools
    @functools.wraps(load_chunk)
    def load_chunk(self, *args, _inner=load_chunk): return _inner(self, *args)
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    numbers = itertools.count()

    def make(
        distribution: str,
        version: str,
        source: str = GOOD,
        *,
        name: str = "mine",
        target: str = "Tier",
        group: str = "kvtier.backends",
        schemes: Sequence[str] = (),
    ) -> str:
        module = f"kvtier_unit_test_{tmp_path.name.replace('-', '_')}_{next(numbers)}"
        site = tmp_path / module
        metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        lines = [f"[{group}]", f"{name} = {module}:{target}"]
        if schemes:
            lines += ["[kvtier.url_schemes]", *(f"{word} = {module}:{target}" for word in schemes)]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(site)
        return module

    return make


def test_listing_imports_nothing(install: Install) -> None:
    module = install("kvtier-mine", "1.2.3", "raise RuntimeError('imported')")
    (info,) = [info for info in available_backends() if info.name == "mine"]
    assert (info.distribution, info.version, info.target) == (
        "kvtier-mine",
        "1.2.3",
        f"{module}:Tier",
    )
    assert module not in sys.modules


def test_the_list_is_sorted_by_name_and_shows_duplicates(install: Install) -> None:
    install("kvtier-z", "1")
    install("kvtier-a", "1")
    install("kvtier-aardvark", "1", name="aardvark")
    listed = [(info.name, info.distribution) for info in available_backends()]
    assert listed == sorted(listed)
    assert [owner for name, owner in listed if name == "mine"] == ["kvtier-a", "kvtier-z"]


def test_only_what_is_asked_for_is_imported(install: Install) -> None:
    other = install("kvtier-other", "1", name="other")
    mine = install("kvtier-mine", "1")
    assert load_backend("mine") is sys.modules[mine].Tier
    assert other not in sys.modules


def test_a_further_url_scheme_finds_its_backend(install: Install) -> None:
    module = install("kvtier-mine", "1", name="mines", group="kvtier.url_schemes")
    assert load_backend("mines") is sys.modules[module].Tier
    assert backend_name("mines") == "mines", "no backend has this class"
    assert "mines" not in [info.name for info in available_backends()]


def test_a_tier_of_a_further_scheme_is_the_backends(install: Install) -> None:
    module = install("kvtier-mine", "1", schemes=["mines"])
    spec = TierSpec.from_url("mines:")
    assert (spec.name, spec.backend) == ("mine", "mine")
    assert spec.tier_class is sys.modules[module].Tier
    assert TierSpec.from_options({"type": "mine", "url": "mines:"}) == spec


def test_a_word_is_one_packages_as_a_name_and_as_a_url_scheme(install: Install) -> None:
    squatter = install("kvtier-squatter", "1", name="rediss")
    mine = install("kvtier-mine", "2", name="my_tier", schemes=["mines", "my-tier"])
    assert load_backend("my-tier") is sys.modules[mine].Tier
    install("kvtier-other", "3", name="x", schemes=["my-tier"])
    install("kvtier-mine-too", "4", name="mines")
    for options, owners in (
        ({"type": "rediss"}, "kvtier-redis 0.1.0 and kvtier-squatter 1"),
        ({"url": "rediss://:hunter2@host"}, "kvtier-redis 0.1.0 and kvtier-squatter 1"),
        ({"type": "my_tier"}, "kvtier-mine 2 and kvtier-other 3"),
        ({"url": "my-tier:"}, "kvtier-mine 2 and kvtier-other 3"),
        ({"type": "mines"}, "kvtier-mine 2 and kvtier-mine-too 4"),
        ({"type": "x", "url": "mines:"}, "kvtier-mine 2 and kvtier-mine-too 4"),
    ):
        with pytest.raises(DuplicateBackendError, match=f"is offered by {owners}; u") as caught:
            TierSpec.from_options(options)
        assert "hunter2" not in str(caught.value)
    assert squatter not in sys.modules
    assert load_backend("redis").__module__.startswith("kvtier_redis")


def test_a_name_that_no_url_can_hold_is_found_by_its_scheme(install: Install) -> None:
    module = install("kvtier-mine", "1", name="my_tier")
    assert load_backend("my_tier") is load_backend("my-tier") is sys.modules[module].Tier
    spec = TierSpec.from_url("my-tier:")
    assert (spec.name, spec.backend) == ("my_tier", "my_tier")
    assert TierSpec.from_options({"type": "my_tier", "url": "my-tier:"}) == spec
    with pytest.raises(ConfigError, match="a URL's scheme cannot hold '_'; write 'my-tier:'"):
        TierSpec.from_url("my_tier:")


@pytest.mark.parametrize("leaves_entry_points", [True, False])
def test_a_package_half_removed_hides_no_other(install: Install, leaves_entry_points: bool) -> None:
    install("kvtier-mine", "1")
    install("kvtier-gone", "0.1", name="gone")
    (metadata,) = Path(sys.path[0]).glob("*.dist-info")
    (metadata / "METADATA").unlink()
    if not leaves_entry_points:
        (metadata / "entry_points.txt").unlink()
    names = [info.name for info in available_backends()]
    assert "mine" in names
    assert "gone" not in names


def test_an_unknown_name_lists_the_installed_and_the_closest(install: Install) -> None:
    install("kvtier-mine", "1")
    with pytest.raises(UnknownBackendError) as caught:
        load_backend("memroy")
    text = str(caught.value)
    assert text.startswith("no backend 'memroy'; did you mean 'memory'? installed: ")
    assert "mine" in text.partition("installed: ")[2].split(", ")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_anywhere", "ModuleNotFoundError: No module named"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "cannot be imported: SystemExit: 3; install what"),
        ("", "AttributeError"),
        ("Tier = 5", "is not a subclass of kvtier_sdk.SecondaryTierManager"),
        ("class Tier: contract_version = 1", "is not a subclass of"),
        (
            TIER.format(version=2),
            "declares contract_version 2, and kvtier-sdk 0.1.0 supports 1; install releases",
        ),
        (GOOD.replace("contract_version = 1", ""), "declares contract_version None"),
        (INCOMPLETE, "Tier does not implement contains_chunk, load_chunk"),
        ("from kvtier_sdk import ChunkTierManager as Tier", "declares contract_version None"),
        (
            GOOD.replace("async def load", "def load"),
            "Tier.load_chunk is not a coroutine function; use 'async def load_chunk'",
        ),
        (GOOD + "    def close(self): pass", "Tier.close is not a coroutine function"),
        (GOOD + "    config_model = dict", "Tier.config_model is not a subclass of"),
        (
            GOOD + "    runner_defaults = {'concurency': 4}",
            "Tier: runner_defaults: unknown option 'concurency'; did you mean 'concurrency'?",
        ),
        (
            GOOD + "    runner_defaults = {'lookup_deadline': '5'}",
            "Tier: runner_defaults: option 'lookup_deadline': '5' has no unit",
        ),
    ],
)
def test_a_backend_that_cannot_be_used_is_named_with_its_version(
    install: Install, source: str, message: str
) -> None:
    install("kvtier-mine", "0.0.7", source)
    with pytest.raises(BackendLoadError) as caught:
        load_backend("mine")
    assert str(caught.value).startswith("backend 'mine' of kvtier-mine 0.0.7")
    assert message in str(caught.value)


def test_a_wrapped_coroutine_function_is_one(install: Install) -> None:
    install("kvtier-mine", "0.0.7", WRAPPED)
    load_backend("mine")


def test_this_release_is_among_those_that_speak_its_contract() -> None:
    assert Version(__version__) in SpecifierSet(CONTRACT_RELEASES[CONTRACT_VERSION])


def test_two_owners_of_a_policy_are_both_named(install: Install) -> None:
    install("kvtier-mine", "1.0", name="p", group="kvtier.policies")
    install("kvtier-mine-too", "2.0", name="p", group="kvtier.policies")
    with pytest.raises(DuplicateBackendError, match=r"policy 'p'.*mine 1.0 and kvtier-mine-too 2"):
        load_policy("p")


CODEC = """
from kvtier_sdk import ChunkCodec

class Codec(ChunkCodec):
    envelope_bytes = 0
    def __init__(self, argument): self.argument = argument
    def seal(self, associated, payload, sealed, envelope): sealed[:] = payload
    def open(self, associated, envelope, sealed, payload): payload[:] = sealed
"""


def test_a_codec_of_another_package_is_found_and_given_its_argument(install: Install) -> None:
    module = install("codecs", "1", CODEC, name="mine", target="Codec", group="kvtier.codecs")
    codec = load_codec("mine:hsm://slot:3")
    assert type(codec) is sys.modules[module].Codec
    assert codec.argument == "hsm://slot:3"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Codec: pass", "is not a subclass of kvtier_sdk.ChunkCodec"),
        (CODEC.replace("def open", "def unlock"), "does not implement open"),
    ],
)
def test_what_is_no_codec_is_refused(install: Install, source: str, message: str) -> None:
    install("codecs", "1", source, name="mine", target="Codec", group="kvtier.codecs")
    with pytest.raises(BackendLoadError, match=message):
        load_codec("mine")
