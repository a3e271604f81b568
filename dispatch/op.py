"""The dispatched operation: a reference, a decision cache, and the way from a call to a kernel."""

import inspect
import json
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import lcm
from operator import truth
from typing import Any

import torch

from kernelmux.capabilities import (
    CompileError,
    FallbackWarning,
    Kernel,
    Reason,
    RegistryError,
    Request,
    SettingError,
    Support,
    Unsupported,
    detect,
)
from kernelmux.dispatch import log, registry, state
from kernelmux.dispatch import settings as environment
from kernelmux.dispatch.decision import Decision
from kernelmux.dispatch.resolve import Candidates, resolve
from kernelmux.dispatch.settings import Choice
from kernelmux.dispatch.state import OPS, PREFER, prefer, reload, rules, settings, track, usage

__all__ = ["OPS", "PREFER", "Op", "prefer", "reload", "track", "usage"]

Run = Callable[..., Any]
_library = torch.library.Library("kernelmux", "FRAGMENT")


class Op:
    """One operation. `name` is its torch.compile name too; `growing` lists the dims that enter keys by bucket.

    `describe(*args)` validates a call in the kernels' argument order and returns its Request; `dims`, `roles` and
    `features` are the names that its Requests may use, for `kernelmux explain`. `phases` narrows environment
    variables. `planned`: kernels are `plan(spec, batch) -> run`. `check(*args)`: deep checks of metadata values, run
    before each call when KERNELMUX_CHECK=1. `schema` is "(Tensor input, …, Tensor(a!) out) -> ()".
    """

    def __init__(
        self,
        name: str,
        family: str,
        reference: Run,
        describe: Callable[..., Request] | None = None,
        *,
        growing: Sequence[str] = (),
        phases: Sequence[str] = (),
        dims: Sequence[str] = (),
        roles: Sequence[str] = (),
        features: Sequence[str] = (),
        schema: str = "",
        tags: Sequence[torch.Tag] = (),
        check: Run | None = None,
        in_place: bool = False,
        graph_safe: bool = True,
        batch_invariant: bool = True,
        planned: bool = False,
    ) -> None:
        if name in OPS:
            raise RegistryError(f"two ops are named {name!r}; rename one of them")
        self.name, self.family, self.describe = name, family, describe
        self.growing, self.phases, self.check, self.planned = tuple(growing), tuple(phases), check, planned
        self.in_place = in_place
        self.dims, self.roles, self.features = (*growing, *dims), tuple(roles), tuple(features)
        self.function = reference
        self.reference = Kernel(
            op=name,
            target=f"{reference.__module__}:{reference.__qualname__}",
            support=Support(device="any", features=frozenset() if in_place else frozenset({"grad"})),
            graph_safe=graph_safe,
            batch_invariant=batch_invariant,
            backend=registry.REFERENCE,
        )
        self.cache: dict[Any, Run] = {}
        self.eager: Run | None = None  # what the torch.compile op runs: a call in the schema's argument order
        self._refused: dict[Any, dict[str, Reason]] = {}
        self._warned: set[str] = set()
        self.bucket: Run = self._first_bucket  # key part of the growing dims, given in the order of `growing`
        OPS[name] = self
        if schema:
            self._define(schema, tags)

    def _define(self, schema: str, tags: Sequence[torch.Tag]) -> None:
        _library.define(self.name + schema, tags=tuple(tags))
        _library.impl(self.name, self._run_eager, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kernelmux::{self.name}", lambda *args: None, lib=_library)

    def _run_eager(self, *args: Any) -> None:
        """What the compiled graph runs: results go to the mutated arguments, nothing is returned."""
        if self.eager is None:
            raise RegistryError(f"op {self.name} has a schema but no eager form; set {self.name.upper()}.eager")
        self.eager(*args)

    def reset(self) -> None:
        self.cache, self._refused, self.bucket = {}, {}, self._first_bucket

    def candidates(self) -> Candidates:
        return Candidates(registry.kernels_of(self.name), self.reference)

    # -- keys ---------------------------------------------------------------------------------------------------

    def _first_bucket(self, *values: int) -> Any:
        """`bucket` until its first call: equal parts of a key give equal decisions."""
        with state.lock:  # not while reload() forgets what the steps are made of
            steps = [self._step(dim) for dim in self.growing]
            bucket = self.bucket = steps[0] if len(steps) == 1 else self._joint(steps)
        return bucket(*values)

    @staticmethod
    def _joint(steps: Sequence[Callable[[int], int]]) -> Run:
        if len(steps) == 2:
            one, two = steps
            return lambda first, second: (one(first), two(second))
        return lambda *values: tuple([step(value) for step, value in zip(steps, values, strict=True)])

    def _step(self, dim: str) -> Callable[[int], int]:
        limits = [k.support.dims[dim] for k in self.candidates().kernels if dim in k.support.dims]
        limits += [r.when[dim] for r in rules() if r.op == self.name and dim in r.when]
        if any(dim in k.support.also_reads for k in self.candidates().kernels):
            return lambda value: value
        edges = sorted({1}.union(*(limit.thresholds for limit in limits)))
        modulus = lcm(*(limit.multiple_of or 1 for limit in limits))
        if modulus == 1:  # callables in C: this runs in every call
            return truth if edges == [1] else partial(bisect_right, edges)
        return lambda value: bisect_right(edges, value) * modulus + value % modulus

    # -- choosing -----------------------------------------------------------------------------------------------

    def pick(self, key: Any, args: Sequence[Any], backend: str = "auto") -> Run:
        """Cold path of a functional op: validate, decide, load, cache. Returns what to call with `args`."""
        if self.describe is None:
            raise RegistryError(f"op {self.name} has no describe(); planned ops use select()")
        cache = self.cache
        request = self.describe(*args)
        run = self.select(key, request, backend) if not request.empty else self.function
        cache[key] = run
        return run

    def select(self, key: Any, request: Request, backend: str = "auto") -> Run:
        """Decide for a request and return the chosen kernel, ready to call.

        A planned op's is `plan(spec, batch) -> (run, decision)`, with the Decision that this very plan came to.
        """
        decision = self.decide(request, backend, self._refused.get(key))
        self._report(decision)
        return self._wrap(key, decision, backend)

    def decide(self, request: Request, backend: str = "auto", refused: dict[str, Reason] | None = None) -> Decision:
        """The Decision for a request on this machine, in the present context."""
        device = detect(request.device)
        return resolve(
            request,
            device,
            self.candidates(),
            rules(),
            settings(),
            state.INSTALLED,
            self.choices(request, backend),
            refused,
        )

    def choices(self, request: Request, backend: str = "auto") -> list[Choice]:
        """The argument's choice and the contexts', strongest first, that speak of a request."""
        found = []
        if backend != "auto":
            found.append(environment.parse_choice(backend, state.backend_names(), "argument backend", exact=True))
        preference = PREFER.get()
        if preference is not None:
            wanted = ("", request.family, f"{request.family}_{request.op}", f"{request.family}_{request.phase}")
            found += [choice for scope, choice in preference.scoped if scope in wanted]
        return found

    def _report(self, decision: Decision) -> None:
        now = settings()
        if now.loglevel:
            log.write(now.logdest, f"decision {decision.request} -> {decision.kernel.id} because {decision.why}")
        if now.record is not None:
            try:
                with open(now.record, "a", encoding="utf-8") as file:
                    file.write(json.dumps(decision.request.as_json(), sort_keys=True) + "\n")
            except OSError as error:
                text = f"KERNELMUX_RECORD is {str(now.record)!r}: {error.strerror}; give a writable path"
                raise SettingError(text) from error
        silent = decision.kernel is not self.reference or decision.device.type != "cuda" or decision.source != "default"
        if not silent and decision.request.label not in self._warned:
            self._warned.add(decision.request.label)
            others = [str(v) for v in decision.verdicts if v.kernel is not self.reference]
            detail = "".join(f"\n  {text}" for text in others) or " no other kernel is declared"
            warnings.warn(
                f"{decision.request.label} runs on its reference, which is slow on CUDA tensors:{detail}",
                FallbackWarning,
                stacklevel=5,
            )

    def _wrap(self, key: Any, decision: Decision, backend: str) -> Run:
        kernel, now = decision.kernel, settings()
        try:
            run = self.function if kernel is self.reference else self._load(kernel)
        except RegistryError:
            raise
        except Exception as error:
            self.refuse(key, decision, error)
            return self.select(key, decision.request, backend)
        # Innermost what belongs to this kernel alone: when it refuses, the next one comes with its own.
        if now.check and self.check is not None and not self.planned:
            run = _checked(self.check, run)
        served = partial(self._served, decision=decision)
        run = _planning(run, served, decision) if self.planned else served(run)
        if kernel is not self.reference:
            run = self._guard(run, key, decision, backend)
        if kernel.slow_build and decision.automatic and "cuda_graph" not in decision.request.features:
            run = self._while_warm(run, key, decision, backend)
        return run

    def _served(self, run: Run, decision: Decision) -> Run:
        """The kernel itself, counted and logged if that is on."""
        now, request = settings(), decision.request
        if state.counting():
            place = (request.op, request.phase, decision.kernel.id)
            run = _counted(run, state.uses.setdefault(place, state.Use(*place, decision.source, decision.why)))
        if now.loglevel:
            run = log.logged(run, decision, now.loglevel, now.logdest)
        return run

    def _load(self, kernel: Kernel) -> Run:
        run = kernel.load()
        ours, theirs = inspect.signature(self.function), inspect.signature(run)
        if list(ours.parameters) != list(theirs.parameters):
            raise RegistryError(f"{kernel.id} takes {theirs}, its reference takes {ours}; make them equal")
        return run

    def _guard(self, run: Run, key: Any, decision: Decision, backend: str) -> Run:
        """Let a kernel refuse before any launch: note the reason for this key, warn once, take the next one."""
        cache = self.cache

        def call(*args: Any) -> Any:
            try:
                return run(*args)
            except (Unsupported, CompileError) as error:
                if isinstance(error, CompileError) and len(decision.ranked) == 1:
                    raise  # its own text says more than a list of candidates
                self.refuse(key, decision, error)
                following = self.select(key, decision.request, backend)
                if key in cache:
                    cache[key] = following
                return following(*args)

        return call

    def refuse(self, key: Any, decision: Decision, error: Exception) -> None:
        """Note that the chosen kernel cannot serve this key after all, and warn of it."""
        kind = "" if isinstance(error, Unsupported | CompileError) else f"{type(error).__name__}: "
        reason = Reason("broken", decision.kernel.id, None, f"refused at run time: {kind}{error}")
        known = self._refused.setdefault(key, {})
        if decision.kernel.id in known:
            return
        known[decision.kernel.id] = reason
        warnings.warn(f"{decision.request.label}: {reason}; using the next", FallbackWarning, stacklevel=4)

    def refused(self, key: Any) -> dict[str, Reason] | None:
        """Kernels that refused this key, with their reasons."""
        return self._refused.get(key)

    def _while_warm(self, run: Run, key: Any, decision: Decision, backend: str) -> Run:
        """Keep an automatic choice of an eager call from a slow build: a decision is cached for a bucket of lengths,
        and what is built may serve only some of them. The others take the next kernel."""

        def call(*args: Any) -> Any:
            dims = self.describe(*args).dims if self.describe is not None else {}
            request = replace(decision.request, dims={**decision.request.dims, **dims})
            if state.INSTALLED.warm(decision.kernel, request):
                return run(*args)
            return self._wrap(key, self.decide(request, backend, self._refused.get(key)), backend)(*args)

        return call


def _checked(check: Run, run: Run) -> Run:
    def call(*args: Any) -> Any:
        check(*args)
        return run(*args)

    return call


def _counted(run: Run, use: state.Use) -> Run:
    def call(*args: Any) -> Any:
        result = run(*args)
        use.calls += 1
        return result

    return call


def _planning(plan: Run, served: Callable[[Run], Run], decision: Decision) -> Run:
    def call(*args: Any) -> tuple[Run, Decision]:
        return served(plan(*args)), decision

    return call
