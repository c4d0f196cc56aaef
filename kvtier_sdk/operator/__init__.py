"""An engine's services for its operator: start log, trace, admin socket and metrics endpoint."""
