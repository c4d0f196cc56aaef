"""An engine's services for its operator: log lines at its start, a trace, a socket, metrics."""
