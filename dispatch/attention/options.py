"""Arguments of plan(), normalised into the values of an AttentionSpec."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import SettingError
from kernelmux.dispatch import settings as environment
from kernelmux.dispatch import state
from kernelmux.dispatch.attention.metadata import Lengths, check_bound, check_equal

DType = torch.dtype | str
FLASHINFER_BACKENDS = ("fa2", "fa3", "cutlass", "trtllm-gen", "trtllm-native", "xqa", "cute-dsl", "cake")


def dtype_argument(name: str, value: DType) -> torch.dtype:
    """A dtype given as itself or by its torch name."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is {value!r}, it must be a torch dtype or its name such as 'bfloat16'")
    return dtype


def neutral(**arguments: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse arguments that are taken for compatibility but would not be applied."""
    for name, (value, allowed) in arguments.items():
        tensor = isinstance(value, Tensor)
        if not any(value is a or (not tensor and type(value) is type(a) and value == a) for a in allowed):
            shown = f"a tensor {list(value.shape)}" if tensor else repr(value)[:60]
            raise ValueError(f"{name} is {shown}, which no kernel here applies; leave it out")


def spec_values(
    phase: str,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    page_size: int,
    dtypes: tuple[DType | None, DType | None, DType | None],
    *,
    causal: bool,
    window_left: int,
    logits_soft_cap: float | None,
    pos_encoding_mode: str,
    rope_scale: float | None,
    rope_theta: float | None,
    masks: tuple[bool, bool, bool] = (False, False, False),
    graph: bool = False,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
) -> tuple[Any, ...]:
    """Values in the order of AttentionSpec's fields. `masks`: custom, multi-item, bidirectional."""
    q = dtype_argument("q_data_type", dtypes[0] or torch.float16)
    kv = q if dtypes[1] is None else dtype_argument("kv_data_type", dtypes[1])
    o = q if dtypes[2] is None else dtype_argument("o_data_type", dtypes[2])
    split = 0 if disable_split_kv or fixed_split_size is None else max(0, fixed_split_size)
    return (
        phase,
        *heads,
        *head_dims,
        page_size,
        *(q, kv, o),
        bool(causal),
        max(-1, window_left),
        float(logits_soft_cap or 0.0),
        pos_encoding_mode,
        1.0 if rope_scale is None else float(rope_scale),
        1e4 if rope_theta is None else float(rope_theta),
        *masks,
        kv == torch.uint8,
        graph,
        split,
        bool(disable_split_kv),
    )


@dataclass(slots=True)
class DecodeOptions:
    """Keyword arguments of the decode wrapper's plan(), with its defaults."""

    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    window_right: int = 0
    logits_soft_cap: float | None = None
    q_data_type: DType | None = "float16"
    kv_data_type: DType | None = None
    o_data_type: DType | None = None
    data_type: DType | None = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    non_blocking: bool = True
    block_tables: Tensor | None = None
    seq_lens: Tensor | None = None
    fixed_split_size: int | None = None
    disable_split_kv: bool = False
    q_len_per_req: int = 1
    is_causal: bool | None = None
    max_sequence_kv: int | None = None

    def spec(self, sizes: tuple[int, int, int, int], graph: bool) -> tuple[Any, ...]:
        """Values of the AttentionSpec. `sizes`: query heads, KV heads, head dim, page size."""
        neutral(window_right=(self.window_right, (0, -1, None)))
        if not isinstance(self.q_len_per_req, int) or self.q_len_per_req < 1:
            raise ValueError(f"q_len_per_req is {self.q_len_per_req!r}, it must be an int of at least 1; correct it")
        q = self.data_type if self.q_data_type is None else self.q_data_type
        kv = self.data_type if self.kv_data_type is None else self.kv_data_type
        return spec_values(
            "decode",
            (sizes[0], sizes[1]),
            (sizes[2], sizes[2]),
            sizes[3],
            (q, kv, self.o_data_type),
            causal=self.q_len_per_req > 1 and self.is_causal is not False,
            window_left=self.window_left,
            logits_soft_cap=self.logits_soft_cap,
            pos_encoding_mode=self.pos_encoding_mode,
            rope_scale=self.rope_scale,
            rope_theta=self.rope_theta,
            graph=graph,
            fixed_split_size=self.fixed_split_size,
            disable_split_kv=self.disable_split_kv,
        )

    def check(self, lengths: Lengths) -> None:
        """What the caller promised must hold."""
        check_bound("max_sequence_kv", self.max_sequence_kv, lengths.max_kv_len, "the longest sequence")
        if state.settings().check:
            check_equal("seq_lens", self.seq_lens, lengths.kv_len)


def check_promises(
    lengths: Lengths,
    uniform_q_len: int | None,
    max_token_per_sequence: int | None,
    max_sequence_kv: int | None,
    seq_lens: Tensor | None,
    seq_lens_q: Tensor | None,
) -> None:
    """What the caller of a prefill plan() promised about lengths must hold."""
    check_bound("max_token_per_sequence", max_token_per_sequence, lengths.max_q_len, "the longest query")
    check_bound("max_sequence_kv", max_sequence_kv, lengths.max_kv_len, "the longest sequence")
    if uniform_q_len is not None and lengths.size and not bool((lengths.q_len == uniform_q_len).all()):
        raise ValueError(f"uniform_q_len is {uniform_q_len}, qo_indptr gives other lengths; leave it out")
    if state.settings().check:
        check_equal("seq_lens", seq_lens, lengths.kv_len)
        check_equal("seq_lens_q", seq_lens_q, lengths.q_len)


def check_backend(name: str) -> None:
    """SettingError for a name that is no backend of ours."""
    if name == "auto":
        return
    try:
        environment.parse_choice(name, state.backend_names(), "argument backend", exact=True)
    except SettingError as error:
        if name in FLASHINFER_BACKENDS:
            raise SettingError(f"{error} ({name!r} is FlashInfer's; kernelmux.flashinfer takes it as a hint)") from None
        raise
