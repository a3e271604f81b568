"""The unified API: each public function and wrapper resolves its call to a kernel."""

import importlib

_FAMILIES = ("attention", "page", "sampling", "topk", "rope", "norm", "activation", "gemm", "quantization", "logits_processor")

__all__: list[str] = []
for _family in _FAMILIES:
    _module = importlib.import_module(f"kernelmux.dispatch.{_family}")
    for _name in getattr(_module, "__all__", ()):
        globals()[_name] = getattr(_module, _name)
        __all__.append(_name)
