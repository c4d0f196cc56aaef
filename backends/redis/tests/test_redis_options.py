import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_sdk import BackendError, ConfigError, TierSpec


def config(url: str, **options: object):
    return TierSpec.from_url(url, **options).config


def test_everything_in_a_url():
    options = config("redis:")
    assert options.seeds == [("127.0.0.1", 6379)]
    assert (options.tls, options.tls_verify, options.prefix) == (False, True, "kvtier")
    options = config("redis://me:p%40ss%2F@kv-1:7000/3?ttl=1500ms&connections=8&prefix=x")
    assert options.seeds == [("kv-1", 7000)]
    assert options.username == "me"
    assert options.password.get_secret_value() == "p@ss/"
    assert (options.db, options.expiry_ms, options.connections, options.prefix) == (3, 1500, 8, "x")
    assert "p@ss" not in repr(options)
    assert config("rediss://kv-1").tls is True
    assert config("redis+unix:///run/r.sock?db=1").socket == "/run/r.sock"
    many = config("redis://a:1?cluster=yes&hosts=b,c:3,[::1]:4")
    assert many.seeds == [("a", 1), ("b", 1), ("c", 3), ("::1", 4)]
    assert config("redis:", host="::1").seeds == [("::1", 6379)]
    assert config("redis:", hosts=["b:2"], sentinel="kv").seeds[1] == ("b", 2)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis://h/x", r"option 'db'"),
        ("redis:127.0.0.1:17001", r"write two slashes"),
        ("redis://h/1?db=2", r"'db' is given in the URL twice"),
        ("rediss://h?tls=no", r"'tls' is given in the URL twice"),
        ("redis+unix://h/s", r"takes a path"),
        ("redis+unix:", r"takes a path"),
        ("redis://h?ttl=1us", r"'ttl' is '1us' but should be greater than"),
        ("redis://h?max_age=1us", r"'max_age' is '1us' but should be greater than"),
        ("redis://h?ttl=1h&max_age=1m", r"'max_age' is 60 s but should be at least 'ttl', which"),
        ("redis://h?capacity=1GiB", r"'capacity': the server keeps the limit.*'maxmemory'"),
        ("redis://h?min_free=5%", r"'min_free': the server keeps the limit"),
        ("redis://h?connections=0", r"option 'connections'"),
        ("redis://h?prefix=a{b}", r"option 'prefix'.*without"),
        ("redis://me@h", r"'username' is given without 'password'"),
        ("redis://h?tls_ca=/x", r"'tls_ca' is given without 'tls'"),
        ("rediss://h?tls_key=/x", r"'tls_key' is given without 'tls_cert'"),
        ("redis://h?sentinel=a&cluster=yes", r"'sentinel' cannot be used beside 'cluster'"),
        ("redis://h/1?cluster=yes", r"'db' cannot be used beside 'cluster'"),
        ("redis+unix:///s?cluster=yes", r"'socket' cannot be used beside 'cluster'"),
        ("redis://h?hosts=b", r"'hosts' is given without 'sentinel' or 'cluster'"),
        ("redis://h?cluster=yes&hosts=b:x", r"'b:x' is not a server"),
        ("redis://h?connect_timeout=0s", r"option 'connect_timeout'"),
    ],
)
def test_mistakes_are_explained(url, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(url)


# Any text, often with characters that separate the parts of a URL.
any_text = st.text() | st.text("ab1@:/?#&=%[]'\" \t\n", max_size=8)
starts = st.sampled_from(["redis://", "rediss://", "redis+unix://", "redis:/", "redis:", "//"])
rests = st.sampled_from(["", "/0?bogus=1", ":70000/0", "/zero", ":1/0?ttl=soon", "?db=1#x"])


@given(starts, any_text, any_text, any_text, rests)
@example("redis://", "us@er", "", "", ":6379/0?bogus=1")
@example("redis://", "", "hun'", "", "/0?bogus=1")
@example("redis://", "u", "hun ", "", "/0?bogus=1")
@example("redis://", "us/er", "", "", "/0")
@example("redis://", "u?ttl=", "", "", "")
@example("redis://", "u", "1?", "", "")
@example("redis:", "u", "", "", "/0")
@example("redis:/", "", "", "?", "/0?bogus=1")
@example("redis://", "", "?", "", "/0?bogus=1")
def test_a_password_is_in_no_message_whatever_is_around_it(start, user, before, after, rest):
    message = ""
    try:
        config(f"{start}{user}:{before}hunter2{after}@h{rest}")
    except (ConfigError, BackendError) as error:
        message = str(error)
    assert "hunter2" not in message


@pytest.mark.parametrize("user", ["us/er", "us?er", "us#er"])
def test_a_name_with_the_characters_of_a_url_is_percent_encoded(user):
    with pytest.raises(ConfigError, match=r"redis://us.er:\*\*\*@h"):
        config(f"redis://{user}:hunter2@h/0?bogus=1")
    assert config("redis://us%2Fer:hun%40ter2@h/0").username == "us/er"
    assert config("redis://user@corp.com:hunter2@h:1/0?prefix=a@b").username == "user@corp.com"


@pytest.mark.parametrize(
    "options",
    [
        {"host": "kv:hunter2@127.0.0.1"},
        {"host": "127.0.0.1:17001"},
        {"host": "a b"},
        {"host": ""},
        {"host": "a/hunter2"},
        {"hosts": "a:1;b:2", "cluster": True},
        {"hosts": ["a:1,b:2"], "cluster": True},
        {"hosts": "me:hunter2@b:1", "cluster": True},
        {"hosts": "::1:2", "cluster": True},
    ],
)
def test_a_host_is_a_name_or_an_address_and_nothing_secret_is_told(options):
    with pytest.raises(ConfigError, match=f"option '{next(iter(options))}'") as caught:
        config("redis:", **options)
    assert "hunter2" not in str(caught.value)
