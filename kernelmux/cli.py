"""The command line: show-config, list, explain, generate. None of the first three needs a GPU or a compiler."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer
from rich.table import Column, Table

import kernelmux
from kernelmux.capabilities import PRESETS, KernelMuxError, Request, detect, dtype_name, dtype_of, preset
from kernelmux.capabilities.kernel import Kernel
from kernelmux.capabilities.verified import verified
from kernelmux.cli_generate import generate
from kernelmux.dispatch import registry
from kernelmux.dispatch.decision import Decision, by_gravity
from kernelmux.dispatch.explain import explain as decide
from kernelmux.dispatch.settings import Settings
from kernelmux.dispatch.state import OPS, settings
from kernelmux.terminal import out

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=kernelmux.__doc__)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """One API for LLM-inference operations, resolved to the best kernel this machine can run."""
    if version:
        print(kernelmux.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command("show-config")
def show_config(as_json: Json = False) -> None:
    """Show device, driver, CUDA, settings, and each library: its version, usable or the reason why not."""
    config = configuration()
    if as_json:
        print(json.dumps(config, indent=1))
        return
    facts = Table(show_header=False, box=None)
    for key, value in config.items():
        if key != "backends":
            text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            facts.add_row(key, text)
    out.print(facts)
    table = Table(_name("backend"), "version", "usable", "kernels", "what for")
    for name, entry in config["backends"].items():
        usable = "yes" if entry["usable"] else f"no: {entry['reason']}"
        table.add_row(name, entry["version"] or "-", usable, str(entry["kernels"]), entry["about"])
    out.print(table)


def _name(title: str) -> Column:
    """A column whose names are never cut off: without them a row says nothing."""
    return Column(title, overflow="fold", min_width=12)


def configuration() -> dict[str, Any]:
    """What show-config prints, as plain values."""
    device = detect()
    backends = {}
    for name, backend in sorted(registry.backends().items()):
        problem = backend.problem()
        extra = f" (extra {backend.extra})" if backend.extra else ""
        backends[name] = {
            "version": backend.package.version() if backend.package else "",
            "usable": problem is None,
            "reason": str(problem) if problem else "",
            "kernels": len(backend.kernels),
            "about": backend.title + extra,
        }
    return {
        "kernelmux": kernelmux.__version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none (CPU build of torch)",
        "driver": _driver(),
        "device": str(device),
        "settings": _set(),
        "backends": backends,
    }


def _driver() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    version = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return f"supports CUDA {version // 1000}.{version % 1000 // 10}"


def _set() -> dict[str, str]:
    """Settings that differ from their defaults."""
    now, default = settings(), Settings()
    found = {f"backend {scope or 'all'}": str(choice) for scope, choice in now.backends.items()}
    for field in dataclasses.fields(now):
        value = getattr(now, field.name)
        if field.name != "backends" and value != getattr(default, field.name):
            found[field.name] = str(value)
    return found or {"all": "defaults"}


@app.command("list")
def list_kernels(
    op: Annotated[str, typer.Argument(help="One op; all by default.")] = "", as_json: Json = False
) -> None:
    """List ops and their kernels with their limits and the architectures on which each was verified."""
    if op and op not in OPS:
        raise typer.BadParameter(f"op is {op!r}, one of {', '.join(sorted(OPS))}")
    rows = [_row(kernel) for name in sorted(OPS) if op in ("", name) for kernel in _kernels(name)]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(_name("op"), _name("kernel"), "verified on", "declared for", "limits", "features")
    for row in rows:
        table.add_row(*(row[k] for k in ("op", "kernel", "verified", "declared", "limits", "features")))
    out.print(table)


def _kernels(name: str) -> list[Kernel]:
    return [*registry.kernels_of(name), OPS[name].reference]


def _row(kernel: Kernel) -> dict[str, str]:
    support = kernel.support
    declared = support.device if support.device != "cuda" else f"sm {support.arch}"
    limits = [f"{name} {limit}" for name, limit in support.dims.items()]
    if support.dtypes is not None:
        combos = ", ".join(sorted("/".join(map(dtype_name, c)) for c in support.dtypes))
        limits.insert(0, f"{'/'.join(support.roles)}: {combos}")
    reference = kernel.backend == registry.REFERENCE
    return {
        "op": kernel.op,
        "kernel": kernel.id,
        "verified": "it defines the op" if reference else ", ".join(sorted(verified(kernel))) or "-",
        "declared": "any device" if reference else declared,
        "limits": "; ".join(limits) or "-",
        "features": "all" if reference else ", ".join(sorted(support.features)) or "-",
    }


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="An op, or op/phase such as attention/decode.")],
    pairs: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value: dims (batch=4), dtypes (q=bfloat16), features=causal+lse.", metavar="KEY=VALUE"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=f"A preset: {', '.join(PRESETS)}. Default: this machine's.")] = "",
    installed: Annotated[
        bool | None,
        typer.Option(help="Judge by this machine's libraries; with --device all count as installed unless given."),
    ] = None,
    backend: Annotated[str, typer.Option(help="As the backend argument of the call.")] = "auto",
    as_json: Json = False,
) -> None:
    """Explain which kernel would serve a call, and why each other one would not."""
    where = preset(device) if device else detect()
    here = installed if installed is not None else not device
    request = parse_request(op, pairs or [])
    decision = decide(request, where, installed=here, backend=backend)
    if as_json:
        print(json.dumps(as_plain(decision), indent=1))
        return
    out.print(str(decision), highlight=False, markup=False, soft_wrap=True)
    given = {*request.dtypes, *request.dims}
    if missing := [name for name in (*OPS[request.op].roles, *OPS[request.op].dims) if name not in given]:
        out.print(f"note     not given, so not judged: {', '.join(missing)}")
    if not here:
        out.print(f"note     every library counts as installed on {where}; --installed judges by this machine's")


def parse_request(op: str, pairs: list[str]) -> Request:
    """A Request from the words of `kernelmux explain`; ValueError for a word that means nothing."""
    name, _, phase = op.partition("/")
    if name not in OPS:
        raise ValueError(f"op is {name!r}, one of {', '.join(sorted(OPS))}")
    if phase and phase not in OPS[name].phases:
        raise ValueError(f"phase is {phase!r}, {name} has {', '.join(OPS[name].phases) or 'none'}")
    if not phase and OPS[name].phases:
        raise ValueError(f"{name} wants a phase: " + ", ".join(f"{name}/{p}" for p in OPS[name].phases))
    dims: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    features: frozenset[str] = frozenset()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise ValueError(f"{pair!r} is not key=value, such as batch=4, q=bfloat16 or features=causal+lse")
        if key in dims or key in dtypes or (key == "features" and features):
            raise ValueError(f"{key} is given twice; give it once (features are joined by +)")
        if key == "features":
            features = frozenset(value.split("+"))
        elif value.lstrip("-").isdigit():
            dims[key] = int(value)
        elif key in OPS[name].dims:
            raise ValueError(f"{key} is {value!r}, it must be an integer")
        else:
            dtypes[key] = dtype_of(value)
    if "num_qo_heads" in dims and dims.get("num_kv_heads"):
        dims.setdefault("group_size", dims["num_qo_heads"] // dims["num_kv_heads"])
    _known(name, dims, dtypes, features)
    return Request(name, OPS[name].family, phase, dtypes=dtypes, dims=dims, features=features)


def _known(op: str, dims: Mapping[str, int], dtypes: Mapping[str, Any], features: frozenset[str]) -> None:
    """Refuse names that no kernel of the op mentions: they would be ignored silently."""
    supports = [k.support for k in registry.kernels_of(op)]
    for what, given, known in (
        ("dimension", dims, {d for s in supports for d in s.dims} | set(OPS[op].dims)),
        ("dtype role", dtypes, {r for s in supports for r in s.roles} | set(OPS[op].roles)),
        ("feature", features, {f for s in supports for f in s.features} | set(OPS[op].features)),
    ):
        for name in sorted(given):
            if known and name not in known:
                raise ValueError(f"{op} has no {what} {name!r}; known: {', '.join(sorted(known))}")


def as_plain(decision: Decision) -> dict[str, Any]:
    """A Decision as JSON values."""
    return {
        "request": decision.request.as_json(),
        "device": str(decision.device),
        "kernel": decision.kernel.id,
        "source": decision.source,
        "why": decision.why,
        "rule": decision.rule.name if decision.rule else None,
        "ranked": [k.id for k in decision.ranked],
        "notes": list(decision.notes),
        "candidates": [
            {"kernel": v.kernel.id, "able": v.able, "reasons": [str(r) for r in v.reasons], "held": str(v.held or "")}
            for v in by_gravity(decision.verdicts, decision.ranked)
        ],
    }


app.command()(generate)


def main() -> None:
    """Entry point: our errors are one clear line, without a traceback."""
    try:
        app(standalone_mode=True)
    except (KernelMuxError, ValueError, TypeError, OSError) as error:
        print(f"kernelmux: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
