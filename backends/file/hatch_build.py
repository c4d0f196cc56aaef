"""Compiles one C extension for all Python versions if ``HATCH_BUILD_HOOK_ENABLE_CUSTOM`` is set."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledPart(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        from packaging.tags import platform_tags
        from setuptools import Distribution, Extension

        # The attribute keeps the directory alive until its files are in the wheel.
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-file-")
        extension = Extension(
            "kvtier_file._batch_io", ["kvtier_file/_batch_io.c"], py_limited_api=True
        )
        command: Any = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
        command.build_lib = f"{self._directory.name}/lib"
        command.build_temp = f"{self._directory.name}/objects"
        command.ensure_finalized()
        command.run()
        for built in Path(command.build_lib).rglob("*.so"):
            build_data["force_include"][str(built)] = str(built.relative_to(command.build_lib))
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{next(platform_tags())}"
