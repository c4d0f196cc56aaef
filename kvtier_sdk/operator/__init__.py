"""What an engine does for its operator: a start in the log, a trace, a socket, metrics."""
