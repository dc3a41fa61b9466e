"""The run folder: logs, checkpoint, manifest, vectors and scores."""
