"""kvtier works on vLLM releases that report neither traces nor the reasons why answers end."""

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvtier_vllm import compat

MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"


class Connector:
    def __init__(self) -> None:
        self.stops: list[tuple[str, str]] = []
        self.manager: Any = SimpleNamespace(note_stop=lambda *stop: self.stops.append(stop))

    def request_finished(self, request: object) -> str:
        return "finished"


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Connector]]:
    module = ModuleType(MODULE)
    own = type("OffloadingConnectorScheduler", (Connector,), dict(vars(Connector)))
    vars(module)["OffloadingConnectorScheduler"] = own
    monkeypatch.setitem(sys.modules, MODULE, module)
    # Set the package's attribute too: ``from package import module`` looks for it first.
    monkeypatch.setattr(MODULE, module, raising=False)
    compat._warn_once.cache_clear()
    yield own
    compat._warn_once.cache_clear()


def make_request(reason: object, token: object) -> Any:
    return SimpleNamespace(request_id="r", get_finished_reason=lambda: reason, stop_reason=token)


@pytest.mark.parametrize(
    ("reason", "token", "told"),
    [("STOP", 7, ["stop 7"]), ("LENGTH", None, ["length"]), (None, None, [])],
)
def test_the_label_is_reason_and_token(
    connector: type[Connector], reason: object, token: object, told: list[str]
) -> None:
    compat.tell_stops()
    compat.tell_stops()
    scheduler = connector()
    assert scheduler.request_finished(make_request(reason, token)) == "finished"
    assert scheduler.stops == [("r", stop) for stop in told]


@pytest.mark.parametrize("missing", ["the method", "the module"])
def test_a_release_without_the_name_starts_with_a_warning(
    connector: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "the module":
        monkeypatch.setitem(sys.modules, MODULE, None)
    else:
        del connector.request_finished
        monkeypatch.delattr(Connector, "request_finished")
    compat.tell_stops()
    assert "does not tell why answers end" in caplog.text


@pytest.mark.parametrize("name", ["get_finished_reason", "stop_reason", "request_id"])
def test_a_request_without_the_name_is_finished_with_one_warning(
    connector: type[Connector], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    compat.tell_stops()
    scheduler = connector()
    request = make_request("STOP", 7)
    delattr(request, name)
    for _ in range(2):
        assert scheduler.request_finished(request) == "finished"
    assert scheduler.stops == []
    assert caplog.text.count("does not tell why answers end") == 1


def test_a_release_without_contexts_of_requests_starts_with_a_warning(
    connector: object, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        compat.tell_traces()
    assert caplog.text.count("spans do not join the traces") == 1
