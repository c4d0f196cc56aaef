"""Reads configuration files in TOML, JSON or YAML. A file's suffix selects the format."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.place import nearest
from kvtier_sdk.options.secret_sources import read_small_file

_MAX_BYTES = 1 << 20


def read_options(path: Path) -> Mapping[str, Any]:
    """Read an options file without validation; raise :class:`ConfigError` if that fails."""
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        kinds = nearest(path.suffix.lower(), _PARSERS, "allowed")
        raise ConfigError(f"{path}: unknown format {path.suffix!r}; {kinds}")
    try:
        content, _ = read_small_file(str(path), _MAX_BYTES)
        text = content.decode("utf-8-sig")
        options = parse(text) if text.strip() else None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not {path.suffix[1:].upper()}: {error}") from None
    if not options:
        raise ConfigError(f"{path}: is empty; see docs/configuration.md for what it holds")
    if not isinstance(options, Mapping):
        raise ConfigError(f"{path}: should hold a table of options")
    return options


def _table(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build a table from pairs; raise for a repeated name, because the parsers would accept it."""
    options: dict[str, Any] = {}
    for name, value in pairs:
        if name in options:
            raise ConfigError(f"option {name!r} is given twice")
        options[name] = value
    return options


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("YAML needs PyYAML: pip install 'kvtier-sdk[yaml]'") from None

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _table((str(key.value), None) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # Do not quote PyYAML's message, because it contains the value, which may be a password.
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(
            f"not YAML{where}; a value that begins with one of ! & * % @ needs quotes"
        ) from None


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".json": lambda text: json.loads(text, object_pairs_hook=_table),
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
