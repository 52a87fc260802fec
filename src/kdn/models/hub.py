"""Copied beside weights: lets `trust_remote_code=True` find the models of the installed kdn."""

try:
    from kdn.models import KDNConfig, KDNForCausalLM, KDNModel
except ImportError as error:
    raise ImportError("this model needs kdn: pip install 'kalman-delta-networks[hf]'") from error

__all__ = ["KDNConfig", "KDNForCausalLM", "KDNModel"]
