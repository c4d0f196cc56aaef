"""An engine's services for its operator: a start log, a history, the admin socket."""
