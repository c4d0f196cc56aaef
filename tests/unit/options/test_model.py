from __future__ import annotations

from typing import Annotated, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, Field, SecretStr, ValidationError, model_validator

from kvtier_sdk import Bytes, ConfigError, Flag, RunnerOptions, TierConfig, TierURL
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place, nearest
from kvtier_sdk.options.secrets import masked, url_without_password, without_password


class Options(TierConfig):
    root: str
    capacity_bytes: Bytes | None = Field(None, alias="capacity", gt=0)
    retries: int = Field(2, ge=0)
    sync: Flag = False


def _refuse(value: object) -> object:
    raise ValueError(f"{value!r} is no token")


def complaint(options: dict[str, object], model: type[TierConfig] = Options) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_options(model, options, Place("tier 'cold'"), ["name"])
    return str(caught.value)


def test_text_is_as_good_as_a_value_of_the_kind() -> None:
    text = {"root": "/x", "capacity": "1KiB", "retries": "3", "sync": "yes"}
    options = validate_options(Options, text, Place("tier"))
    assert (options.capacity_bytes, options.retries, options.sync) == (1024, 3, True)
    with pytest.raises(ValidationError, match="frozen"):
        options.root = "/y"


def test_the_attribute_is_not_a_second_name_of_the_option() -> None:
    assert "unknown option 'capacity_bytes'" in complaint({"root": "/x", "capacity_bytes": 1})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"retries": -1}, "option 'retries' is -1 but should be greater than or equal to 0"),
        ({"retries": "two"}, "option 'retries' is 'two' but should be a whole number"),
        ({"sync": "maybe"}, "option 'sync' is 'maybe' but should be true or false"),
        ({"capacity": "4 gigs"}, "option 'capacity': '4 gigs': unit 'gigs' is none of"),
    ],
)
def test_a_wrong_value_says_what_it_should_be(options: dict[str, object], told: str) -> None:
    assert complaint({"root": "/x", **options}).startswith(f"tier 'cold': {told}")


class Pairs(TierConfig):
    needs = (("key_file", "tls"),)
    excludes = (("tls", "speed_bytes"),)
    tls: Flag = False
    key_file: str | None = Field(None, alias="key")
    speed_bytes: Bytes | None = Field(None, alias="speed")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"key": "/k"}, "option 'key' is given without 'tls'"),
        ({"tls": "yes", "speed": "1KiB"}, "option 'tls' cannot be used beside 'speed'"),
    ],
)
def test_options_that_need_or_exclude_each_other(options: dict[str, object], told: str) -> None:
    validate_options(Pairs, {"tls": "yes", "key": "/k"}, Place("tier 't'"))
    validate_options(Pairs, {"tls": "no", "speed": "1KiB"}, Place("tier 't'"))
    with pytest.raises(ConfigError, match=told):
        validate_options(Pairs, options, Place("tier 't'"))


WRONG = (
    "retries=-1 concurrency=0 max_batch=0 load_deadline=5 runner=cloud breaker_failures=0 "
    "breaker_window=0 probe_interval=0s open_deadline=0s required=perhaps max_probe_interval=500ms"
)


@pytest.mark.parametrize("written", WRONG.split())
def test_the_runner_refuses_what_cannot_work(written: str) -> None:
    name, _, value = written.partition("=")
    with pytest.raises(ConfigError, match=f"option '{name}'"):
        validate_options(RunnerOptions, {name: value}, Place("tier"))


def test_a_url_comes_apart() -> None:
    assert TierURL.parse("redis+unix://us%65r:p%40ss@Host:6379/a%20b?ttl=1h&x=") == TierURL(
        scheme="redis+unix",
        host="host",
        port=6379,
        username="user",
        password="p@ss",
        path="/a b",
        options={"ttl": "1h", "x": ""},
    )


@pytest.mark.parametrize(
    ("url", "host", "path", "options"),
    [
        ("mine:", None, "", {}),
        ("mine:?path=/x", None, "", {"path": "/x"}),
        ("mine:///data/kv?capacity=1GiB", None, "/data/kv", {"capacity": "1GiB"}),
        ("mine://[::1]:6379/0", "::1", "/0", {}),
        ("mine:?secret=a+b/c%2Bd%20e&flag=", None, "", {"secret": "a+b/c+d e", "flag": ""}),
    ],
)
def test_every_part_but_the_scheme_may_be_absent(
    url: str, host: str | None, path: str, options: dict[str, str]
) -> None:
    parsed = TierURL.parse(url)
    assert parsed.scheme == "mine"
    assert (parsed.host, parsed.path, parsed.options) == (host, path, options)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((url, "names no backend") for url in ("", "/data/kv", "memory", ":x", "//host/path")),
        *((f"redis://{rest}", "cannot be read") for rest in ("h:port/", "h:99999/", "[::1/")),
        *((f"mine:?{query}", "every option has a '='") for query in ("ttl", "ttl=1h&", "&ttl=1h")),
        ("redis:?ttl=1h&ttl=2h", "option 'ttl' is given twice"),
        ("file:///data/kv#1?capacity=1GiB", "write '#' as %23"),
        ("redis://kv:s3cr3t#x@host:1/0", "write '#' as %23"),
        ("redis://kv:s3cr3t?x@host:1/0", "'?' as %3F"),
        ("redis://kv:s3cr3t/x@host:1/0", "'/' as %2F"),
        ("redis://kv:s3:cr3t@host:x/0", "':' as %3A"),
        ("redis://kv:12/cr3t@host:1/0", "'/' as %2F"),
        ("redis://kv:12?cr3t=@host:1/0", "'?' as %3F"),
        ("redis://kv:s3%cr3t@host:x/0", "'%' as %25"),
        ("mine:?password=s3&cr3t", "'&' as %26"),
    ],
)
def test_a_url_that_cannot_be_used_says_what_to_write(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TierURL.parse(url)
    assert said in str(caught.value)
    assert "cr3t" not in str(caught.value)


def test_a_url_is_its_query_where_a_backend_says_nothing_else() -> None:
    assert TierConfig.options_from_url(TierURL.parse("mine:?a=1&b=2")) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("url", ["mine://host", "mine:///path", "mine:path"])
def test_a_part_without_a_meaning_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"takes no host and no path; write 'mine:\?option"):
        TierConfig.options_from_url(TierURL.parse(url))


class Guarded(TierConfig):
    auth_token: Annotated[str, BeforeValidator(_refuse)] = ""
    pin: SecretStr | None = Field(None, min_length=9)
    password: str = Field("", min_length=9)
    nodes: list[int] = Field(default_factory=list)
    account: dict[str, int] = Field(default_factory=dict)
    tokens: int = 1

    @model_validator(mode="after")
    def never(self) -> Self:
        if self.tokens == 0:
            raise ValueError(f"cannot log in with {self.password} and {self.auth_token!r}")
        return self


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"auth_token": "hunter2"}, "option 'auth_token' has a value that is not allowed"),
        ({"pin": "hunter2"}, "option 'pin' has a value that is not allowed; it is a secret"),
        ({"password": "hunter2"}, "option 'password' has a value that is not allowed"),
        ({"password": {"x": "hunter2"}}, "option 'password' has a value that is not allowed"),
        ({"nodes": ["redis://u:hunter2@h"]}, "option 'nodes[0]' is 'redis://u:***@h'"),
        ({"nodes": "redis://u:hunter2@h"}, "option 'nodes' is 'redis://u:***@h' but should be"),
        ({"account": [{"password": "hunter2"}]}, "option 'account' is [{'password': '***'}] but"),
        ({"account": {"client_secret": "hunter2"}}, "option 'account.client_secret' has a value"),
        ({"tokens": 0, "password": "hunter2-hunter2"}, "cannot log in with *** and ''"),
        ({"pasword": "hunter2"}, "unknown option 'pasword'; did you mean 'password'?"),
        ({"tokens": "many"}, "option 'tokens' is 'many' but should be"),
    ],
)
def test_a_secret_is_never_shown(options: dict[str, object], told: str) -> None:
    text = complaint(options, Guarded)
    assert told in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://u:p@h/0", "redis://u:***@h/0"),
        ("redis://:p@h", "redis://:***@h"),
        ("trace redis:/u:p@h", "trace redis:/u:***@h"),
        ("redis://u:a/b@c:d@h/0", "redis://u:***@h/0"),
        ("at redis://u:p@h, http://x:1/y", "at redis://u:***@h, http://x:1/y"),
        ("redis://h:1/0?ttl=1h", "redis://h:1/0?ttl=1h"),
        ("s3://b?secret_access_key=p&region=x", "s3://b?secret_access_key=***"),
        ("mine:?ttl=1h&secret=p=q&r=s end", "mine:?ttl=1h&secret=*** end"),
        ("mine:?path=/a:b&password_file=/x", "mine:?path=/a:b&password_file=/x"),
        ("redis://user@h", "redis://user@h"),
    ],
)
def test_what_is_shown_of_a_text_with_urls_in_it(text: str, shown: str) -> None:
    assert without_password(text) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:hun ter'2\"@h/0", "redis://u:***@h/0"),
        ("mine:?password=hun ter'2#x&path=/a", "mine:?password=***"),
        ("mine:?ttl=1h&password=p&q=r", "mine:?ttl=1h&password=***"),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert url_without_password(url) == shown


@given(*[st.text(st.characters(exclude_characters="\0"))] * 2)
def test_a_password_is_not_shown_whatever_is_in_it(user: str, password: str) -> None:
    shown = url_without_password(f"redis://{user}:{password}@host/0")
    assert shown == f"redis://{user.partition(':')[0]}:***@host/0"
    assert masked("nodes", [f"redis://{user}:{password}@host/0"]) == [shown]


def test_nearest_lists_what_is_known() -> None:
    assert nearest("rdis", ["s3", "redis"], "installed") == (
        "did you mean 'redis'? installed: redis, s3"
    )
    assert nearest("zzz", ["s3"], "installed") == "installed: s3"
    assert nearest("zzz", [], "installed") == "installed: none"
