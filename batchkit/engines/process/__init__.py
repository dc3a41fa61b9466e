"""An engine that runs in a child process."""
