"""One module per way of computing the four operations; see `kdn/ops/registry.py` for what each defines."""
