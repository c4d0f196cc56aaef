from kvtier_sdk import TieringConfig
from kvtier_sdk.admin import AdminSocket
from kvtier_sdk.cli.engine import purge_pools, tell_purge


def test_a_purge_names_an_engine_that_has_restarted(tmp_path):
    path = tmp_path / "admin.sock"
    answers = iter([{"is_meant": True}, {"purge": None, "idle_s": 0.0}])
    config = TieringConfig.from_dict({"pool_bytes": "1MiB", "admin_socket": str(path)})
    with AdminSocket(path, lambda *_: next(answers)):
        purged = purge_pools(config, ["0" * 64])
    assert list(tell_purge(config, purged)) == [
        f"{path}: the engine has restarted, with an empty pool"
    ]
