from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BeforeValidator, Field, SecretStr

from kvtier_sdk import Bytes, BytesOrShare, Count, Flag, Seconds, Share, TierConfig
from kvtier_sdk.cli.option_table import describe_options


class Base(TierConfig):
    """A base.

    Attributes:
        near: said by the base.
        far: said by the base
            in two lines.
    """

    near: str = "x"
    far: int = 3


class Options(Base):
    """Options of every kind.

    Attributes:
        near: said anew.
        size_bytes: how ``large``.

    Raises:
        nothing: at all.
    """

    size_bytes: Bytes | None = Field(None, alias="size")
    must_s: Seconds = Field(alias="must")
    either: BytesOrShare = 0.05
    part: Share = 0.5
    count: Count = 2
    flag: Flag = True
    choice: Annotated[Literal["a", "b"], BeforeValidator(str.lower)] = "a"
    one_of: int | str = 1
    names: tuple[str, ...] = ("n",)
    password: str = "hush"
    hidden: SecretStr | None = SecretStr("hush")
    told: str = Field("", description="told by the field")
    strange: object = None


INFO = {option.name: option for option in describe_options(Options)}


@pytest.mark.parametrize(
    ("name", "kind", "unit", "default"),
    [
        ("size", "size", "bytes", None),
        ("either", "size or share", "bytes, or a share from 0 to 1", 0.05),
        ("must", "duration", "seconds", None),
        ("part", "share", "0 to 1", 0.5),
        ("count", "number", None, 2),
        ("flag", "flag", None, True),
        ("choice", "choice", None, "a"),
        ("one_of", "number or text", None, 1),
        ("names", "list", None, ["n"]),
        ("far", "number", None, 3),
        ("strange", "object", None, None),
    ],
)
def test_an_option_has_a_kind_a_unit_and_a_default(
    name: str, kind: str, unit: str | None, default: object
) -> None:
    option = INFO[name]
    assert (option.kind, option.unit, option.default) == (kind, unit, default)
    assert option.required is (name == "must")
    assert option.choices == (["a", "b"] if name == "choice" else ())


@pytest.mark.parametrize("name", ["password", "hidden"])
def test_the_default_of_a_secret_is_not_shown(name: str) -> None:
    assert (INFO[name].default, INFO[name].secret) == ("***", True)


def test_the_meaning_is_the_nearest_docstrings() -> None:
    assert {name: option.meaning for name, option in INFO.items() if option.meaning} == {
        "near": "said anew",
        "far": "said by the base in two lines",
        "size": "how `large`",
        "told": "told by the field",
        "password_file": "file that holds `password`, in its place",
        "hidden_file": "file that holds `hidden`, in its place",
    }


def test_a_secret_is_followed_by_its_file() -> None:
    names = list(INFO)
    assert [name for name in names if not name.endswith("_file")] == Options.option_names()
    assert names[names.index("password") + 1] == "password_file"
    assert (INFO["password_file"].kind, INFO["password_file"].secret) == ("text", False)
