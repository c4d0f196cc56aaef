"""Configuration files in TOML, JSON or YAML, told apart by their suffix."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.place import kind_of, nearest

_MOST_BYTES = 1 << 20


def read_options(path: Path) -> Mapping[str, Any]:
    """Read a file of options, which are not validated yet.

    Raises:
        ConfigError: the suffix is not ``.toml``, ``.json``, ``.yaml`` or ``.yml``; the file cannot
            be read or parsed, is empty, or holds no table; or it is YAML and PyYAML is missing.
    """
    parse = _PARSERS.get(path.suffix.lower())
    if parse is None:
        kinds = nearest(path.suffix.lower(), _PARSERS, "allowed")
        raise ConfigError(f"{path}: the suffix {path.suffix!r} says no known format; {kinds}")
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"is larger than {_MOST_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
        options = parse(text) if text.strip() else None
    except OSError as error:
        fault = str(error.strerror)
    except UnicodeDecodeError:
        fault = "is not UTF-8 text"
    except tomllib.TOMLDecodeError as error:
        fault = f"not TOML: {error}"
    except json.JSONDecodeError as error:
        fault = f"not JSON: {error.msg} (at line {error.lineno}, column {error.colno})"
    except ConfigError as error:
        fault = str(error)
    except (ValueError, RecursionError):
        # Python's own text quotes the value, which may be a password.
        fault = "holds a number of too many digits, or is nested too deeply"
    else:
        if options and isinstance(options, Mapping):
            return options
        fault = f"holds {kind_of(options)} but should hold a table of options"
        if options is None or options == {}:
            fault = "is empty; see docs/configuration.md for what it holds"
    raise ConfigError(f"{path}: {fault}")


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_table)


def _table(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table; as in TOML, a repeated name is an error."""
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
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        # The parser's own text quotes the value, which may be a password.
        mark = getattr(error, "problem_mark", None)
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(
            f"not YAML{where}; a value that begins with one of ! & * % @ needs quotes"
        ) from None


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".json": _json,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
