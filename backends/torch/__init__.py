"""What torch brings itself: its attention kernels, its matrix products and its norm."""

from collections.abc import Iterator

from kernelmux.capabilities import Backend, Device, Kernel, Limit, Reason, Request, Support, dtype_combos

_HALF = ("fp16 fp16 fp16", "bf16 bf16 bf16")
_PHASES = ("decode", "prefill", "ragged")


def _one_head_dim(request: Request, device: Device) -> Iterator[Reason]:
    qk, vo = request.dims["head_dim_qk"], request.dims["head_dim_vo"]
    if qk != vo:
        yield Reason("shape", "head_dim_vo", vo, f"must equal head_dim_qk, which is {qk}")


def _attention(variant: str, target: str, features: str, dtypes: tuple[str, ...] = _HALF, **fields: object) -> Kernel:
    roles, combos = dtype_combos("q kv out", *dtypes)
    named = frozenset(f"causal window kv_strides_differ unaligned {features}".split())
    graph_safe = bool(fields.pop("graph_safe", False))
    support = Support(roles=roles, dtypes=combos, features=named, **{"phases": _PHASES, **fields})  # type: ignore[arg-type]
    return Kernel("attention", f"kernelmux.backends.torch.{target}:plan", support, variant, graph_safe=graph_safe)


def _flash(variant: str, features: str, phases: tuple[str, ...], graph_safe: bool) -> Kernel:
    dims = {"head_dim_qk": Limit(max=256, multiple_of=8)}
    return _attention(
        variant, "attention_flash", features, arch=Limit(min=80), phases=phases, dims=dims, also=_one_head_dim,
        graph_safe=graph_safe,
    )  # fmt: skip


def _product(op: str, features: str, variant: str = "", dtypes: tuple[str, ...] = (), **fields: object) -> Kernel:
    roles = "a b out bias" if "bias" in features else "a b out"
    names, combos = dtype_combos(roles, *(dtypes or [" ".join([variant or "bf16"] * len(roles.split()))]))
    named = frozenset(f"a_column_major b_row_major a_strided b_strided out_strided unaligned {features}".split())
    support = Support(roles=names, dtypes=combos, features=named, **fields)  # type: ignore[arg-type]
    return Kernel(op, f"kernelmux.backends.torch.gemm:{op}", support, variant)


_NORM_ROLES, _NORM_DTYPES = dtype_combos("input weight out", *_HALF, "fp32 fp32 fp32")

BACKEND = Backend(
    name="torch",
    title="torch's own kernels",
    kernels=(
        _attention("cpu", "attention_sdpa", "lse", (*_HALF, "fp32 fp32 fp32"), device="cpu", also=_one_head_dim),
        _attention("sdpa", "attention_sdpa", "", (*_HALF, "fp32 fp32 fp32")),
        _flash("flash", "lse cuda_graph", ("ragged",), graph_safe=True),
        _flash("flash_gathered", "lse", ("decode", "prefill"), graph_safe=False),
        # On a CPU fp16 products are slower than the reference's.
        _product("mm_bf16", "bias", device="any", arch=Limit(min=80)),
        _product("mm_bf16", "bias", "fp16", arch=Limit(min=70)),
        _product("mm_bf16", "", "fp32_out", ("bf16 bf16 fp32", "fp16 fp16 fp32"), arch=Limit(min=80)),
        _product("bmm_bf16", "", device="any", arch=Limit(min=80)),
        _product("bmm_bf16", "", "fp16", arch=Limit(min=70)),
        Kernel(
            "rmsnorm",
            "kernelmux.backends.torch.norm:rmsnorm",
            Support(
                device="any",
                roles=_NORM_ROLES,
                dtypes=_NORM_DTYPES,
                features=frozenset({"per_head", "inner_strided", "unaligned"}),
            ),
        ),
    ),
)
