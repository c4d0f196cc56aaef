from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretBytes, SecretStr

from kvtier_sdk import ConfigError, TierConfig, TierSpec
from kvtier_sdk.options.model import secrets_of, validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.secret_sources import FileSecret, environment_without_secrets

PLACE = Place("kv.toml", "tiers[0]")


class Account(TierConfig):
    user: str = "ada"
    password: SecretStr | None = None
    pin: SecretBytes | None = None
    token: str = ""
    use_token: bool = True


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("hunter2\n")
    return path


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PW": "hunter2", "EMPTY": "", "ODD": "${PW}"}.items():
        monkeypatch.setenv(name, value)


def read(**options: Any) -> Account:
    return validate_options(Account, options, PLACE)


def test_a_secret_of_any_type_is_in_a_file_or_a_variable(secret: Path) -> None:
    for account in (
        read(password="${PW}", pin="${PW}", token="${PW}"),
        read(password_file=str(secret), pin_file=str(secret), token_file=str(secret)),
    ):
        assert account.password is not None
        assert account.pin is not None
        assert account.password.get_secret_value() == "hunter2"
        assert account.pin.get_secret_value() == b"hunter2"
        assert account.token == "hunter2"
        assert secrets_of(account).mask("hunter2 of ada") == "*** of ada"
        assert "hunter2" not in repr(account)


def test_only_texts_that_are_secret_have_a_file() -> None:
    assert Account.secret_files() == {
        "password": "password_file",
        "pin": "pin_file",
        "token": "token_file",
    }
    assert read(user="${PW}").user == "${PW}"


def test_what_a_variable_holds_is_taken_as_it_is() -> None:
    assert secrets_of(read(password="${ODD}")).mask("<${PW}>") == "<***>"


@pytest.mark.parametrize(
    ("content", "value"),
    [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), (" a ", " a "), ("é", "é")],
)
def test_one_line_break_at_the_end_of_a_file_is_no_part_of_it(
    tmp_path: Path, content: str, value: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content.encode())
    assert FileSecret(str(path)).get_secret_value() == value


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"password": "${NO}"}, "password': variable 'NO' of the environment is not set"),
        ({"token": "${EMPTY}"}, "token': variable 'EMPTY' of the environment is empty"),
        ({"password": "x${PW}"}, "password' has a variable among other characters; write"),
        ({"password_file": "hunter2"}, "password_file' should be the absolute path of a file"),
        ({"password_file": 2}, "password_file' should be the absolute path of a file"),
        ({"password_file": "/no"}, "password_file': /no cannot be read: No such file or dir"),
        ({"password_file": "/dev/null"}, "password_file': /dev/null is empty"),
        ({"password_file": "/no", "password": "hunter2"}, "is given beside 'password'; leave one"),
        ({"pasword_file": "/no"}, "did you mean 'password_file'?"),
        ({"user_file": "/no"}, "unknown option 'tiers[0].user_file'"),
    ],
)
def test_a_mistake_names_the_option_and_no_value(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as told:
        read(**options)
    assert complaint in str(told.value)
    assert "hunter2" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"", "is empty"), (b"\n", "is empty"), (b"\xff", "is not UTF-8"), (b"a" * 70_000, "longer")],
)
def test_a_file_that_holds_no_secret(secret: Path, content: bytes, fault: str) -> None:
    secret.write_bytes(content)
    with pytest.raises(ConfigError, match=fault) as told:
        read(password_file=str(secret))
    assert told.value.__context__ is None


def test_a_secret_is_written_down_by_its_source(secret: Path) -> None:
    account = read(password="${PW}", user="ada")
    written = {"user": "ada", "password": "${PW}"}
    assert account.to_dict() == account.to_dict(secrets=True) == written
    account = read(password_file=str(secret), token="plain")
    assert account.to_dict() == {"password_file": str(secret), "token": "***"}
    assert read(**account.to_dict(secrets=True)) == account


def test_a_file_that_has_changed(secret: Path) -> None:
    account = read(password_file=str(secret))
    password, secrets = account.password, secrets_of(account)
    assert isinstance(password, FileSecret)
    assert not password.read_again()
    assert secrets.mask("hunter2 hunter3") == "*** hunter3"
    secret.write_text("hunter3")
    assert password.read_again()
    assert password.get_secret_value() == "hunter3"
    assert secrets.mask("hunter2 hunter3") == "*** ***"


def test_children_do_not_inherit_the_variables_that_were_read() -> None:
    read(password="${PW}")
    inherited = environment_without_secrets()
    assert "PW" not in inherited
    assert inherited["PATH"] == os.environ["PATH"]


def test_secrets_in_a_url_and_in_options(secret: Path) -> None:
    options = {"type": "redis", "password": "${PW}", "sentinel": "kv"}
    options["sentinel_password_file"] = str(secret)
    url = f"redis://:${{PW}}@h/0?sentinel=kv&sentinel_password_file={secret}"
    for config in (TierSpec.from_options(options).config, TierSpec.from_url(url).config):
        for password in (config.password, config.sentinel_password):  # type: ignore[attr-defined]
            assert password.get_secret_value() == "hunter2"


def test_a_file_in_a_url_is_shown(secret: Path) -> None:
    with pytest.raises(ConfigError, match=f"{secret}&ttl=1x") as told:
        TierSpec.from_url(f"redis://h?password_file={secret}&ttl=1x")
    assert "ttl" in str(told.value)
