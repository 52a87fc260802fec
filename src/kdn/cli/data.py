"""`kdn data …`: text to token shards. What it does is in kdn.training.data.prepare."""

from kdn.training.data.prepare import add_parser as add

__all__ = ["add"]
