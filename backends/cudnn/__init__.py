"""cuDNN: scaled-dot-product attention graphs over paged and packed keys and values."""

from collections.abc import Iterator

from kernelmux.capabilities import Backend, Device, Kernel, Limit, Package, Reason, Request, Support, dtype_combos

# What is declared below was built for SM80 to SM121 with 9.19. Older ones lack packed queries beside pages (9.7),
# packed tensors on SM80 to SM89 and all of SM120 (9.18.1), or give wrong numbers (9.10.0, 9.10.1, 9.14.0).
OLDEST = 91801


def _library() -> Reason | None:
    import cudnn

    if cudnn.backend_version() >= OLDEST:
        return None
    found = cudnn.backend_version_string()
    return Reason("version", "the cuDNN library", found, "needs 9.18.1 or later", "pip install -U nvidia-cudnn-cu13")


PACKAGE = Package(
    distributions=("nvidia-cudnn-frontend",),
    module="cudnn",
    versions=">=1.18",
    flags=_library,
    install="pip install 'kernelmux[cudnn]'",
)


def _window_needs_causal(request: Request, device: Device) -> Iterator[Reason]:
    """A window needs a right bound in cuDNN; with one query row a causal mask changes nothing and gives it."""
    if "window" in request.features and "causal" not in request.features:
        yield Reason("feature", "window", None, "only beside a causal mask when a sequence has several query rows")


# With several query rows, cuDNN lets NaN past a sequence's end in its last page reach the output (measured on an H200
# with 9.19, pages of 4 and more, tests/conformance): pages of one key have no such place, others are gathered first.
PAGES = (1, 2, 4, 8)
PAGES = tuple(1 << i for i in range(11))


def _kernel(
    variant: str, phases: tuple[str, ...], features: str, entry: str = "plan", warm: str = "warm", **dims: Limit
) -> Kernel:
    roles, dtypes = dtype_combos("q kv out", "fp16 fp16 fp16", "bf16 bf16 bf16")
    plain = {
        "batch": Limit(max=65535),
        "head_dim_qk": Limit(max=256, multiple_of=8),
        "head_dim_vo": Limit(max=256, multiple_of=8),
    }
    support = Support(
        arch=Limit(min=80),
        phases=phases,
        roles=roles,
        dtypes=dtypes,
        dims={**plain, **dims},
        features=frozenset(f"causal kv_strides_differ window {features}".split()),
        also=None if variant == "decode" else _window_needs_causal,
    )
    target, warmed = (f"kernelmux.backends.cudnn.attention:{name}" for name in (entry, warm))
    graph_safe = "cuda_graph" in support.features
    return Kernel("attention", target, support, variant, slow_build=warmed, graph_safe=graph_safe)


_SMALL, _GATHERED = {"page_size": Limit(max=1)}, {"entry": "plan_gathered", "warm": "warm_gathered"}
_MANY = Limit(min=2)  # whether cuDNN's LSE holds the sink is not known; one query row takes none
BACKEND = Backend(
    name="cudnn",
    title="cuDNN attention",
    kernels=(
        _kernel("decode", ("decode",), "lse cuda_graph", page_size=Limit(one_of=PAGES), q_len=Limit(max=1)),
        _kernel("verify", ("decode",), "lse cuda_graph", q_len=Limit(min=2), **_SMALL),
        _kernel("prefill", ("prefill",), "lse cuda_graph", **_SMALL),
        _kernel("prefill_gathered", ("prefill",), "lse", **_GATHERED),  # type: ignore[arg-type]
        _kernel("ragged", ("ragged",), "lse cuda_graph"),
        _kernel("prefill_sinks", ("prefill",), "sinks cuda_graph", q_len=_MANY, **_SMALL),
        _kernel("prefill_sinks_gathered", ("prefill",), "sinks", q_len=_MANY, **_GATHERED),  # type: ignore[arg-type]
        _kernel("ragged_sinks", ("ragged",), "sinks cuda_graph", q_len=_MANY),
    ),
    package=PACKAGE,
    extra="cudnn",
)
