import io
import logging
from collections.abc import Iterator

import pytest

from kvtier_vllm.engine_log import join_engine_log

OURS, ENGINE = logging.getLogger("kvtier"), logging.getLogger("vllm")


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    # This is not a fixture, because pytest adds its log handlers only after fixtures have run.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for logger in (OURS, ENGINE):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    before = OURS.level, ENGINE.level
    yield
    for logger, level in zip((OURS, ENGINE), before, strict=True):
        logger.setLevel(level)


def configure_engine(level: int) -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("(EngineCore) %(levelname)s %(message)s"))
    ENGINE.handlers = [handler]
    ENGINE.setLevel(level)
    ENGINE.propagate = False
    return stream


def test_lines_have_the_engines_format_and_level(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    stream = configure_engine(logging.INFO)
    join_engine_log()
    logging.getLogger("kvtier.tier.disk").info("disk: open")
    logging.getLogger("kvtier.tier.disk").debug("disk: a detail")
    assert stream.getvalue() == "(EngineCore) INFO disk: open\n"


def test_they_follow_when_the_engine_reconfigures_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    before = configure_engine(logging.INFO)
    join_engine_log()
    after = configure_engine(logging.DEBUG)
    join_engine_log()
    logging.getLogger("kvtier.tier.disk").debug("disk: a detail")
    assert (before.getvalue(), after.getvalue()) == ("", "(EngineCore) DEBUG disk: a detail\n")


def test_a_programs_own_handler_stays_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    engines, own = configure_engine(logging.INFO), io.StringIO()
    OURS.addHandler(logging.StreamHandler(own))
    join_engine_log()
    OURS.warning("mine")
    assert (engines.getvalue(), own.getvalue()) == ("", "mine\n")


def test_an_engine_that_configures_no_log_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch)
    join_engine_log()
    assert (OURS.handlers, OURS.propagate) == ([], True)
