"""A backend to copy: `cp -r backends/_template backends/<name>`, then go through the numbers. Nothing else is edited.

The folder's name is not looked at; a leading underscore hides it. This file imports no vendor code: it is read on every
machine, also where the library is absent.
"""

from kernelmux.capabilities import Backend, Kernel, Limit, Package, Reason, Support, dtype_combos


# 1. Is the library usable? Metadata, version range, a guarded import of `module` (the compiled one), then this
#    function, which judges the build. Whatever it raises means "unavailable: type: text". `flags` may be left out.
def _build_flags() -> Reason | None:
    import some_library

    if some_library.built_without_paging:
        return Reason("version", "this build of some_library", "without paging", "needs it", "pip install …")
    return None


PACKAGE = Package(
    distributions=("some-library",),  # as pip knows it; any one of several names will do
    module="some_library._C",
    versions=">=1.2,<2",
    flags=_build_flags,
    tools=(),  # programs that it starts, such as ("nvcc",)
    install="pip install some-library",
)

# 2. What can each kernel do? Whatever is not named is refused: a feature, a phase, a dtype combination. Limits are per
#    dim; `kernelmux list` shows the dims, roles and features of every op. Odd combinations are two kernels
#    with a `variant` and one target; the last resort is `also=`, a pure function that yields further reasons.
_ROLES, _DTYPES = dtype_combos("input weight out", "bf16 bf16 bf16", "fp16 fp16 fp16")
_RMSNORM = Support(
    device="cuda",
    arch=Limit(min=80),
    roles=_ROLES,
    dtypes=_DTYPES,
    dims={"hidden": Limit(max=8192, multiple_of=8)},
    features=frozenset({"per_head"}),
)

# 3. The kernels. `target` is imported on first use; its function has the parameters of the op's reference, by name and
#    in order (dispatch/<family>/reference.py). A planned op (attention) has `plan(spec, batch) -> run`.
BACKEND = Backend(
    name="template",
    title="What `kernelmux show-config` calls it",
    kernels=(
        Kernel("rmsnorm", "kernelmux.backends._template.norm:rmsnorm", _RMSNORM, graph_safe=True, deterministic=True),
    ),
    package=PACKAGE,
    extra="",  # the extra of pyproject.toml that installs it, when there is one
)

# 4. A rule in policies/, with evidence, when the default order (by kernel id, before the reference) is not right.
# 5. `python -m pytest tests/test_conformance.py -k <name>`: cases come from the declaration. On a GPU machine
#    `python benchmarks/record_conformance.py DIR --backend <name>`, and its file goes to capabilities/verified/.
