"""Reading a configuration file: TOML, JSON or YAML, by its suffix."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
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
    except (ValueError, LookupError, AttributeError):
        # Python's own text quotes the value, which may be a password.
        fault = "holds a value that is not what its tag says, or a number of too many digits"
    except RecursionError:
        fault = "is nested too deeply"
    else:
        if options and isinstance(options, Mapping):
            return options
        fault = f"holds {kind_of(options)} but should hold a table of options"
        if options is None or options == {}:
            fault = "is empty; see docs/configuration.md for what it holds"
    raise ConfigError(f"{path}: {fault}")


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
        """Refuses a repeated name, as TOML does."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in names:
                    line = key.start_mark.line + 1
                    raise ConfigError(f"option {name!r} is given twice (at line {line})")
                names.add(name)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        # PyYAML quotes the offending value, which may be a password; cut it off.
        problem = _QUOTED_IN_YAML.sub(rf"\1; {_QUOTE_IN_YAML}", error.problem or "")
        mark = error.problem_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ConfigError(f"not YAML: {problem}{where}") from None
    except yaml.YAMLError:
        raise ConfigError("not YAML: it holds a character that YAML does not allow") from None


_QUOTED_IN_YAML = re.compile(r"(constructor for the tag|tag handle|alias) .*", re.DOTALL)
_QUOTE_IN_YAML = "put a value that begins with '!', '&' or '*' in quotes"

_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".json": _json,
    ".toml": tomllib.loads,
    ".yaml": _yaml,
    ".yml": _yaml,
}
