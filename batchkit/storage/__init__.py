"""The run folder: the log, its checkpoint, the manifest and the scores."""
