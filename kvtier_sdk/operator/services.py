"""Services of an engine for its operator: a recorded trace, an admin socket, a metrics endpoint."""

from __future__ import annotations

from collections.abc import Set
from contextlib import ExitStack
from pathlib import Path

from kvtier_sdk.admin import AdminSocket
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.exporter import serve_metrics
from kvtier_sdk.operator.control import ManagerControl
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.trace import TraceRecorder


class OperatorServices:
    """The services that a configuration asks for.

    They belong to an engine, which may open its manager more than once. The ``recorder`` records
    finished requests; it is ``None`` if no trace is configured.

    Args:
        config: the configuration of the services.
        clock: the source of time.
        chunk_bytes: length of a chunk, for the trace.
    """

    def __init__(self, config: TieringConfig, clock: Clock, chunk_bytes: int) -> None:
        self._config = config
        self._clock = clock
        self._stack = ExitStack()
        self._control: ManagerControl | None = None
        self.recorder: TraceRecorder | None = None
        if config.trace_dir is not None:
            self.recorder = TraceRecorder(
                Path(config.trace_dir),
                file_bytes=config.trace_file_bytes,
                files=config.trace_files,
                chunk_bytes=chunk_bytes,
                clock=clock,
            )
            self._stack.callback(self.recorder.close)

    def attend(self, manager: TieringManager, fingerprints: Set[str]) -> None:
        """Serve an open ``manager`` from now on, in place of any earlier one.

        The ``fingerprints`` are those of the namespaces of its tiers.
        """
        if self._control is not None:
            self._control.manager, self._control.fingerprints = manager, fingerprints
            return
        config, enter = self._config, self._stack.enter_context
        control = self._control = ManagerControl(manager, fingerprints, self._clock, self.recorder)
        if (port := config.metrics_port) is not None:
            host = config.metrics_host
            enter(serve_metrics(lambda: control.manager.samples(), port=port, host=host))
        if config.admin_socket is not None:
            enter(AdminSocket(Path(config.admin_socket), control.answer))

    def close(self) -> None:
        """End all services; a second call does nothing."""
        self._stack.close()
