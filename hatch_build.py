"""A build hook that compiles the core if ``HATCH_BUILD_HOOK_ENABLE_CUSTOM`` is set.

It compiles the C code, and the modules named in pyproject.toml with mypyc. It writes nothing into
the checkout, so code run from a checkout stays uncompiled.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledCore(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        from mypyc.build import mypycify
        from setuptools import Distribution, Extension

        # The attribute keeps the directory alive until its files are in the wheel.
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-core-")
        work = Path(self._directory.name)
        sources = self._named("compiled") - self._named("interpreted")
        extensions = mypycify(
            # Hide the errors that the type checker reports in modules that are not compiled.
            ["--follow-imports=silent", f"--cache-dir={work}/cache", *sorted(sources)],
            group_name="kvtier_sdk",
            debug_level="0",
            target_dir=f"{work}/c",
        )
        planes = ["kvtier_sdk/codecs/_planes.c"]
        extensions.append(
            # Older compilers vectorize all loops only with -O3. The extension is optional, because
            # the code needs x86-64 or ARM; other processors do without compression.
            Extension(
                "kvtier_sdk.codecs._planes", planes, extra_compile_args=["-O3"], optional=True
            )
        )
        command: Any = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = f"{work}/lib", f"{work}/objects"
        command.ensure_finalized()
        command.run()
        for built in (work / "lib").rglob("*.so"):
            build_data["force_include"][str(built)] = str(built.relative_to(work / "lib"))
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def _named(self, option: str) -> set[str]:
        return {str(path) for pattern in self.config[option] for path in Path().glob(pattern)}
