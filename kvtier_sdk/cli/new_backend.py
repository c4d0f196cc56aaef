"""``kvtier new-backend``: writes a package with a working tier, to start a backend from."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import typer

from kvtier_sdk.contract import CONTRACT_RELEASES, CONTRACT_VERSION
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.registry import available_backends, url_schemes

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_LONGEST = 30
_TEMPLATES = Path(__file__).with_name("templates")


def new_backend_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The name by which a configuration chooses the backend: lowercase letters and "
            "digits, with '-' or '_' between them. The package is kvtier-NAME.",
        ),
    ],
) -> None:
    """Write a package with a new backend that already keeps the contract, in this directory.

    The package contains a tier that keeps chunks as files, the conformance kit as its tests, a
    Makefile and a CI workflow. Make the tier use your store instead of files; 'make test' checks
    the tier against the contract.
    """
    _check_name(name)
    words = _words(name)
    project = Path(words["DISTRIBUTION"])
    if project.exists() or project.is_symlink():
        raise ConfigError(f"{project} exists already; choose another NAME")
    try:
        for template in _TEMPLATES.rglob("*.in"):
            path = project / _filled(str(template.relative_to(_TEMPLATES).with_suffix("")), words)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(template.read_text(encoding="utf-8"), words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename or project}: {error.strerror}") from error
    print(f"{project}: a working backend {name!r}. Its store is in {words['PACKAGE']}/tier.py.")
    # A kvtier-sdk installed from a directory or a wheel may be on no index, so give pip its path.
    origin = distribution("kvtier-sdk").read_text("direct_url.json")
    parts = urlsplit(json.loads(origin)["url"] if origin else "")
    source = shlex.quote(str(Path(unquote(parts.path))))
    options = f" PIP_OPTIONS={source}" if parts.scheme == "file" else ""
    print(f"    cd {shlex.quote(str(project))} && make test{options}")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ConfigError(
            f"NAME {name!r}: should be up to {_LONGEST} lowercase letters and digits, with '-' or "
            "'_' between them and a letter first, for example 'my-store'"
        )
    if name.startswith(("kvtier-", "kvtier_")):
        raise ConfigError(f"NAME {name!r}: leave out 'kvtier-'; the package name adds it")
    if name == "kvtier":
        raise ConfigError("NAME 'kvtier' is taken: in a tier's 'type' it stands for any backend")
    for info in available_backends():
        if _scheme(name) in map(_scheme, [info.name, *url_schemes(info)]):
            raise ConfigError(
                f"NAME {name!r} is taken: {info.distribution} {info.version} provides the backend "
                f"{info.name!r}"
            )
    try:
        installed = version(_words(name)["DISTRIBUTION"])
    except PackageNotFoundError:
        return
    raise ConfigError(f"NAME {name!r} is taken: kvtier-{_scheme(name)} {installed} is installed")


def _scheme(name: str) -> str:
    return name.replace("_", "-")


def _words(name: str) -> Mapping[str, str]:
    """Map each ``@WORD@`` of a template to its replacement."""
    scheme = _scheme(name)
    return {
        "NAME": name,
        "SCHEME": scheme,
        "DISTRIBUTION": f"kvtier-{scheme}",
        "PACKAGE": f"kvtier_{scheme.replace('-', '_')}",
        "CLASS": "".join(part.capitalize() for part in scheme.split("-")),
        "CONTRACT": str(CONTRACT_VERSION),
        "SDK": CONTRACT_RELEASES[CONTRACT_VERSION],
    }


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z]+)@", lambda found: words[found[1]], text)
