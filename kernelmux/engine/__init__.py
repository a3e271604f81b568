"""A small inference engine on the public API: paged KV cache, continuous batching, per-request sampling.

The example of how to use kernelmux: `model.py` holds the forward pass. `kernelmux generate` runs it.
"""

from kernelmux.engine.cache import PagePool, Sequence
from kernelmux.engine.config import ModelConfig, Rope, read_config
from kernelmux.engine.engine import Engine, Totals
from kernelmux.engine.loader import Checkpoint, demo_model, install_demo_model, load
from kernelmux.engine.model import Layer, Llama, Weights
from kernelmux.engine.sampler import Sampling, sample
from kernelmux.engine.scheduler import Scheduler, Step, build_step

__all__ = [
    "Checkpoint",
    "Engine",
    "Layer",
    "Llama",
    "ModelConfig",
    "PagePool",
    "Rope",
    "Sampling",
    "Scheduler",
    "Sequence",
    "Step",
    "Totals",
    "Weights",
    "build_step",
    "demo_model",
    "install_demo_model",
    "load",
    "read_config",
    "sample",
]
