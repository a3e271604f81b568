"""cuDNN: scaled-dot-product attention graphs over paged and packed keys and values."""

from collections.abc import Iterator
from typing import Any

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
    install="pip install nvidia-cudnn-frontend",
)


def _window_needs_causal(request: Request, device: Device) -> Iterator[Reason]:
    """A window needs a right bound in cuDNN; with one query row a causal mask changes nothing and gives it."""
    if "window" in request.features and "causal" not in request.features:
        yield Reason("feature", "window", None, "only beside a causal mask when a sequence has several query rows")


# With several query rows, cuDNN lets NaN past a sequence's end in its last page reach the output (measured on an H200
# with 9.19, pages of 4 and more, tests/conformance): pages of one key have no such place. Other pages are gathered
# first, or, in a CUDA graph, their slots are taken for pages of one key.
PAGES = tuple(1 << i for i in range(11))


def _kernel(variant: str, phase: str, more: str, features: str, entry: str = "plan", **dims: Limit) -> Kernel:
    roles, dtypes = dtype_combos("q kv out", "fp16 fp16 fp16", "bf16 bf16 bf16")
    plain = {
        "batch": Limit(max=65535),
        "head_dim_qk": Limit(max=256, multiple_of=8),
        "head_dim_vo": Limit(max=256, multiple_of=8),
    }
    support = Support(
        arch=Limit(min=80),
        phases=(phase,),
        roles=roles,
        dtypes=dtypes,
        dims={**plain, **dims},
        features=frozenset(f"causal window {more} {features}".split()),
        also=None if variant == "decode" else _window_needs_causal,
    )
    module = "slots" if entry == "plan_slots" else "attention"
    target, warm = (f"kernelmux.backends.cudnn.{module}:{name}" for name in (entry, entry.replace("plan", "warm")))
    graph_safe = "cuda_graph" in support.features
    return Kernel("attention", target, support, variant, slow_build=warm, graph_safe=graph_safe)


# How pages are read: as they are, gathered, or slot by slot.
_ONE: dict[str, Any] = {"page_size": Limit(max=1), "features": "cuda_graph kv_strides_differ"}
_GATHERED: dict[str, Any] = {"entry": "plan_gathered", "features": "kv_strides_differ"}
_SLOTS: dict[str, Any] = {"entry": "plan_slots", "features": "cuda_graph", "page_size": Limit(min=2)}
_PACKED: dict[str, Any] = {"features": "cuda_graph kv_strides_differ"}
_MANY = Limit(min=2)  # rows of the longest sequence: a single one takes no sinks

BACKEND = Backend(
    name="cudnn",
    title="cuDNN attention",
    kernels=(
        _kernel("decode", "decode", "lse", **{**_ONE, "page_size": Limit(one_of=PAGES)}, q_len=Limit(max=1)),
        _kernel("verify", "decode", "lse", **_ONE, q_len=_MANY),
        _kernel("verify_slots", "decode", "lse", **_SLOTS, q_len=_MANY),
        _kernel("prefill", "prefill", "lse", **_ONE),
        _kernel("prefill_gathered", "prefill", "lse", **_GATHERED),
        _kernel("prefill_slots", "prefill", "lse", **_SLOTS),
        _kernel("ragged", "ragged", "lse", **_PACKED),
        # Whether cuDNN's LSE holds the sink is not known.
        _kernel("prefill_sinks", "prefill", "sinks", **_ONE, q_len=_MANY),
        _kernel("prefill_sinks_gathered", "prefill", "sinks", **_GATHERED, q_len=_MANY),
        _kernel("prefill_sinks_slots", "prefill", "sinks", **_SLOTS, q_len=_MANY),
        _kernel("ragged_sinks", "ragged", "sinks", **_PACKED, q_len=_MANY),
    ),
    package=PACKAGE,
    extra="cudnn",
)
