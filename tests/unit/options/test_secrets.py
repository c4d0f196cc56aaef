from __future__ import annotations

import traceback
from typing import Any
from urllib.parse import quote

import pytest
from pydantic import SecretBytes, SecretStr

from kvtier_sdk import TierAuthError, TierConfig, TierError, TierURL
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.secrets import Secrets, masked_error

SECRET = "hunter2 & 'sons'=\u00e9"
HIDING = Secrets([SECRET])


class Account(TierConfig):
    user: str = "ada"
    password: str = ""
    pin: SecretStr | None = None
    key: SecretBytes = SecretBytes(b"")
    more: dict[str, Any] | None = None
    nodes: tuple[str, ...] = ()
    use_token: bool = True


def test_every_secret_of_a_tier_is_known() -> None:
    account = Account(
        password="first-1",
        pin=SecretStr("second-2"),
        key=SecretBytes(b"third-3"),
        more={"list": [{"auth_token": "fourth-4"}], "plain": "fifth-5"},
        nodes=("redis://ada:si%2Fxth@h/0", "mine:?password=seventh-7&x=y"),
    )
    text = "first-1 second-2 third-3 fourth-4 fifth-5 si/xth seventh-7 ada True"
    assert secrets_of(account).mask(text) == "*** *** *** *** fifth-5 *** *** ada True"
    assert secrets_of(Account()).mask("all of it") == "all of it"


@pytest.mark.parametrize("shown", [SECRET, repr(SECRET)[1:-1], quote(SECRET, safe="")])
def test_a_secret_is_hidden_however_it_is_written(shown: str) -> None:
    assert HIDING.mask(f"ERR AUTH <{shown}> called") == "ERR AUTH <***> called"


def test_a_short_secret_is_hidden_where_it_stands_alone() -> None:
    assert Secrets(["e"]).mask("AUTH e, or 'e', never") == "AUTH ***, or '***', never"


class ProfileError(TierAuthError):
    def __init__(self, profile: str) -> None:
        super().__init__("refused", retryable=True)
        self.profile = profile


class WrappedError(Exception):
    def __init__(self, inner: object) -> None:
        self.inner = [inner]

    def __str__(self) -> str:
        return f"wrapped {self.inner}"


def raised(*errors: BaseException) -> BaseException:
    try:
        if len(errors) > 1:
            try:
                raise raised(*errors[:-1])
            except BaseException as error:
                raise errors[-1] from error
        raise errors[-1]
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        TierAuthError(f"ERR AUTH {SECRET}"),
        ValueError(SECRET, 5),
        OSError(2, SECRET, SECRET),
        WrappedError(SECRET),
        ExceptionGroup("two", [ValueError(SECRET), ExceptionGroup("x", [WrappedError(SECRET)])]),
        SystemExit(SECRET),
    ],
    ids=repr,
)
def test_no_secret_is_in_what_leaves_of_an_exception(error: BaseException) -> None:
    error.add_note(f"with {SECRET}")
    for chain in ([error], [error, TierError("outer")], [TierError(SECRET), error, KeyError(1)]):
        shown = masked_error(raised(*chain), HIDING)
        told = "".join(traceback.format_exception(shown))
        for each in (told, repr(shown), str(vars(shown))):
            assert "hunter2" not in each
            assert "sons" not in each
        assert "in raised" in told, "the frames are still told"
        assert type(error).__name__ in told


def test_what_shows_no_secret_stays_the_same_object() -> None:
    for error in (KeyError(5), OSError(2, "no"), WrappedError("x"), ProfileError(SECRET)):
        assert masked_error(error, HIDING) is error


def test_a_replacement_has_the_meaning_of_the_original() -> None:
    odd = ProfileError(SECRET)
    odd.__cause__ = OSError(SECRET)
    shown = masked_error(odd, HIDING)
    assert type(shown) is TierAuthError
    assert (str(shown), shown.retryable, vars(shown)["profile"]) == ("refused", True, "***")
    stranger = masked_error(WrappedError(SECRET), HIDING)
    assert (type(stranger).__name__, str(stranger)) == ("WrappedError", 'wrapped ["***"]')
    assert not isinstance(stranger, TierError)


def test_a_url_shows_no_secret_when_it_is_written_out() -> None:
    url = TierURL.parse("redis://u:hunter2@h/0?auth_token=hunter3&ttl=1h")
    assert (url.password, url.options["auth_token"]) == ("hunter2", "hunter3")
    assert "hunter" not in repr(url)
