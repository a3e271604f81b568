"""The facts of a Llama-architecture model that the forward pass needs, read from a transformers config."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = ("llama", "mistral")


@dataclass(frozen=True, eq=False)
class Rope:
    """How positions turn q and k: by formula ("plain", "llama31"), or by a table of cos and sin ("table")."""

    kind: str
    theta: float
    dim: int
    scale: float = 1.0
    low: float = 1.0
    high: float = 4.0
    old_context: int = 8192
    table: Tensor | None = None  # fp32 [positions, dim]: cos, then sin


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """Sizes and constants. `window_left`: keys seen to the left of a token, -1 = all."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    rope: Rope
    tied: bool  # the output matrix is the embedding
    window_left: int = -1


def read_config(config: Any) -> ModelConfig:
    """A ModelConfig from a transformers config, or what has its attributes; ValueError for a model that won't run.

    `rope_factors` [head_dim / 2], beyond transformers' names: divisors of the frequencies, as GGUF files carry them.
    """
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"model_type is {config.model_type!r}, one of {', '.join(ARCHITECTURES)}; use such a model")
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in wanted.items():
        if getattr(config, name, value) != value:
            raise ValueError(f"{name} is {getattr(config, name)!r}, only {value!r} is written here; use another model")
    window = getattr(config, "sliding_window", None)
    return ModelConfig(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        rope=_read_rope(config),
        tied=config.tie_word_embeddings,
        window_left=window - 1 if window else -1,
    )


def _read_rope(config: Any) -> Rope:
    factors = getattr(config, "rope_factors", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = said.get("rope_type", said.get("type", "default"))
    theta = float(said.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    if factors is not None:
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim) / factors.double()
        return Rope("table", theta, head_dim, table=_table(frequencies, config.max_position_embeddings, 1.0))
    if kind == "default":
        return Rope("plain", theta, head_dim)
    if kind == "linear":
        return Rope("plain", theta, head_dim, scale=float(said["factor"]))
    if kind == "llama3":
        low, high = float(said["low_freq_factor"]), float(said["high_freq_factor"])
        old = int(said["original_max_position_embeddings"])
        return Rope("llama31", theta, head_dim, float(said["factor"]), low, high, old)
    if kind == "yarn":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        return Rope("table", theta, head_dim, table=_table(frequencies, config.max_position_embeddings, magnitude))
    raise ValueError(f"rope_type is {kind!r}, one of default, linear, llama3, yarn; use another model")


def _table(frequencies: Tensor, positions: int, magnitude: float) -> Tensor:
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), frequencies.double())
    return (torch.cat([angles.cos(), angles.sin()], dim=-1) * magnitude).float()
