"""What an engine offers its operator: a start log, and services such as the admin socket."""
