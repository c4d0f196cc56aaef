from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_sdk import contract, errors, testing, types
from kvtier_sdk.testing import CHECKS, Check


def plain(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    return " ".join(text.replace("*", "").replace("`", "").split())


def contract_prose() -> str:
    found = []
    for module in (contract, errors, types):
        for _, one in inspect.getmembers(module, inspect.isclass):
            found.append(inspect.getdoc(one) or "")
            found += [inspect.getdoc(method) or "" for method in vars(one).values()]
    return plain(" ".join(found))


PROSE = contract_prose()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_cites_the_contract_word_for_word(check: Check) -> None:
    assert plain(check.says) in PROSE


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_says_its_rule_in_a_line(check: Check) -> None:
    assert inspect.iscoroutinefunction(check.run)
    assert check.rule.endswith(".")
    assert len(check.rule) < 100


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TierConfromance'"):
        testing.TierConfromance  # noqa: B018


def run_without(missing: list[str], code: str) -> str:
    block = "".join(f"sys.modules[{name!r}] = None; " for name in missing)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {block}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("TierConformance", "pytest"),
        ("tier_state_machine", "hypothesis"),
    ],
)
def test_a_missing_extra_is_a_sentence_with_the_command(name: str, missing: str) -> None:
    said = run_without([missing], f"from kvtier_sdk.testing import {name}")
    assert said.splitlines()[-1] == (
        f"ModuleNotFoundError: kvtier_sdk.testing.{name} needs {missing}: "
        "pip install 'kvtier-sdk[testing]'"
    )


def test_the_checks_themselves_need_neither_pytest_nor_hypothesis() -> None:
    code = """
from kvtier_sdk.testing import TierSubject, run_kit
for found in run_kit(TierSubject("memory:")):
    if found.check in ("check_what_is_stored_comes_back", "tier_state_machine"):
        print(found.result, found.why)
"""
    assert run_without(["pytest", "hypothesis"], code).splitlines() == [
        "passed ",
        "skipped hypothesis is missing: pip install 'kvtier-sdk[testing]'",
    ]


def test_chunks_of_another_length_are_in_another_namespace() -> None:
    subject = testing.TierSubject("memory:")
    assert subject.context(chunk_bytes=64).namespace == subject.namespace.for_chunks(64)
    given = subject.context(chunk_bytes=64, namespace=subject.namespace)
    assert given.namespace == subject.context().namespace == subject.namespace


PAGE = (Path(__file__).parents[3] / "docs" / "conformance.md").read_text()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_check_has_its_line_on_the_page(check: Check) -> None:
    needs = [
        getattr(need, "name" if isinstance(need.value, int) else "value") for need in check.needs
    ]
    lines = [" ".join(line.split()) for line in re.split(r"\n(?=- |\n)", PAGE)]
    (line,) = [line for line in lines if line.startswith(f"- `{check.name}`: ")]
    rule, _, needed = line.partition(" Needs ")
    assert rule == f"- `{check.name}`: {check.rule}"
    assert all(f"`{need}`" in needed for need in needs)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_a_block_of_the_page_runs(block: str) -> None:
    exec(compile(block, "docs/conformance.md", "exec"), {"__name__": "page"})


def test_the_page_names_every_hook_and_setting() -> None:
    suite = testing.TierConformance
    settings = [name for name in suite.__annotations__ if not name.startswith("_")]
    for name in [*settings, *(hook.value for hook in testing.Hook)]:
        assert f"`{name}" in PAGE
