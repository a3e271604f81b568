"""FlashAttention-3: Hopper kernels for paged and packed attention."""

from collections.abc import Iterator

from kernelmux.capabilities import Backend, Device, Kernel, Limit, Package, Reason, Request, Support, dtype_combos

# Build options without which something declared below is missing or, for head dims, silently served by another one.
_NEEDED = ("PAGEDKV", "LOCAL", "VARLEN", "SPLIT", "FP16", "FP8", "HDIM64", "HDIM128", "HDIM192", "HDIM256")


def _build_flags() -> Reason | None:
    from flash_attn_config import CONFIG

    flags = CONFIG["build_flags"]
    if disabled := [name for name in _NEEDED if flags.get(f"FLASHATTENTION_DISABLE_{name}", False)]:
        return Reason("version", "this build of flash_attn_3", f"without {', '.join(disabled)}", "needs them", _INSTALL)
    return None


_INSTALL = "pip install tokenspeed-fa3"
PACKAGE = Package(
    distributions=("tokenspeed-fa3", "flash-attn-3"),
    module="flash_attn_3._C",
    versions=">=3.0.0,<4",
    flags=_build_flags,
    install=_INSTALL,
)


def _one_head_dim(request: Request, device: Device) -> Iterator[Reason]:
    """The wheels leave out the kernels of two head dims; their host code accepts them and returns garbage."""
    qk, vo = request.dims["head_dim_qk"], request.dims["head_dim_vo"]
    if qk != vo:
        yield Reason("shape", "head_dim_vo", vo, f"must equal head_dim_qk, which is {qk}")


# With pages of 128 or more and many query rows the library loads whole tiles of keys, and what lies past a sequence's
# end in its last page reaches the output when it is NaN: measured on an H200, tests/conformance "page-128".
TILE = 64


def _kernels(
    variant: str, dtypes: tuple[str, ...], features: str, dim_step: int, **dims: Limit
) -> tuple[Kernel, Kernel, Kernel]:
    """Paged, paged with large pages (one query row each), and ragged. A graph of a ragged batch cannot be captured:
    the end of the keys must be known, or NaN behind it would reach the last sequence."""
    paged = f"causal window lse cuda_graph no_split kv_strides_differ {features}"
    forms: tuple[tuple[str, str, tuple[str, ...], dict[str, Limit]], ...] = (
        ("", paged, ("decode", "prefill"), {"page_size": Limit(max=TILE)}),
        ("large_pages", paged, ("decode",), {"page_size": Limit(min=TILE + 1), "q_len": Limit(max=1)}),
        ("ragged", paged.replace("cuda_graph ", ""), ("ragged",), {}),
    )
    roles, combos = dtype_combos("q kv out", *dtypes)
    made = []
    for form, named, phases, more in forms:
        support = Support(
            arch=Limit(one_of=(90,)),
            phases=phases,
            roles=roles,
            dtypes=combos,
            dims={"head_dim_qk": Limit(max=256, multiple_of=dim_step), **dims, **more},
            features=frozenset(named.split()),
            also=_one_head_dim,
        )
        name = "_".join(part for part in (variant, form) if part)
        target = "kernelmux.backends.flash_attn_3.attention:plan"
        made.append(Kernel("attention", target, support, name, graph_safe="cuda_graph" in support.features))
    return made[0], made[1], made[2]


BACKEND = Backend(
    name="flash_attn_3",
    title="FlashAttention-3",
    kernels=(
        *_kernels("", ("fp16 fp16 fp16", "bf16 bf16 bf16"), "", 8),
        # Sinks are bf16 in the kernel, which keeps 64 of them in shared memory.
        *_kernels("sinks", ("bf16 bf16 bf16",), "sinks", 8, num_qo_heads=Limit(max=64)),
        *_kernels("fp8", ("e4m3 e4m3 bf16",), "", 16),
    ),
    package=PACKAGE,
    extra="fa3",
)
