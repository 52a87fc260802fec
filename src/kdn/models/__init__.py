"""Language models: any mixer, or any pattern of mixers, in one plain backbone, as Hugging Face models.

    config.py     `KDNConfig`: sizes, the mixer (or one per layer), the mixers' options
    modeling.py   the blocks, `KDNModel`, `KDNForCausalLM`
    cache.py      `KDNCache`: the states of all layers, to go on from, save and load
    checkpoint.py says in one sentence why a checkpoint does not load
    hub.py        goes with weights to a hub, for trust_remote_code
    loss.py       cross entropy that never holds all logits
    presets.py    the paper's sizes and small ones by name, and the table of their parameters
    fla.py        loads flash-linear-attention's checkpoints

Importing this package needs transformers, and registers the models with its Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kdn.models.cache import KDNCache
from kdn.models.config import KDNConfig
from kdn.models.modeling import KDNForCausalLM, KDNModel

__all__ = ["KDNCache", "KDNConfig", "KDNForCausalLM", "KDNModel"]

AutoConfig.register(KDNConfig.model_type, KDNConfig, exist_ok=True)
AutoModel.register(KDNConfig, KDNModel, exist_ok=True)
AutoModelForCausalLM.register(KDNConfig, KDNForCausalLM, exist_ok=True)
