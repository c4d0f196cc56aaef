import sys

import pytest

from kvtier_mooncake.client import make_client
from kvtier_sdk import ConfigError, TierSpec


def config(url: str, **options: object):
    return TierSpec.from_url(url, **options).config


def test_everything_in_a_url():
    options = config(
        "mooncake://kv-1:5000?protocol=rdma&devices=mlx5_0,mlx5_1&replicas=2&lend=1GiB"
        "&address=10.0.0.7&metadata_server=http://kv-1:8080/metadata&timeout=500ms"
    )
    assert (options.master, options.protocol) == ("kv-1:5000", "rdma")
    assert options.devices == "mlx5_0,mlx5_1"
    assert (options.replicas, options.lend_bytes, options.timeout_s) == (2, 2**30, 0.5)
    assert (options.address, options.metadata_server) == ("10.0.0.7", "http://kv-1:8080/metadata")
    assert config("mooncake:").master == "127.0.0.1:50051"
    assert config("mooncake://[::1]:1").master == "[::1]:1"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("mooncake://h/x", r"takes the master alone; write 'mooncake://kv-1:50051'"),
        ("mooncake://me:pw@h", r"takes the master alone"),
        ("mooncake://h?port=1&host=i", r"'host' is given in the URL twice"),
        ("mooncake://h?protocol=udp", r"'protocol'.*'udp'.*'tcp' or 'rdma'"),
        ("mooncake://h?devices=mlx5_0", r"'devices' is given without 'protocol=rdma'"),
        ("mooncake://h?lend=1MiB", r"'lend' is below 16MiB"),
        ("mooncake://h?capacity=1GiB", r"'capacity': the nodes' memory is the limit"),
        ("mooncake://h?ttl=1h", r"'ttl': the nodes' memory is the limit"),
        ("mooncake://h?runner=thread", r"has to run in a process of its own"),
    ],
)
def test_mistakes_are_explained(url, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(url)


@pytest.fixture
def without_client(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mooncake", None)
    return monkeypatch


def test_a_client_that_is_not_installed(without_client):
    with pytest.raises(ConfigError, match=r"not installed: pip install mooncake-transfer-engine,"):
        make_client(config("mooncake:"))


def test_a_client_whose_libraries_are_missing(without_client, tmp_path):
    without_client.delitem(sys.modules, "mooncake")
    without_client.syspath_prepend(tmp_path)
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/store.py").write_text("raise ImportError('libnuma.so.1: cannot open')")
    with pytest.raises(ConfigError, match=r"libnuma.so.1: cannot open; as root, apt-get install"):
        make_client(config("mooncake:"))
