"""Measure which form of a pruned model is the fastest on this device."""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from xtrax.sparse._checks import as_fraction, as_int, check_callable, check_outside_trace
from xtrax.sparse._leaves import matrices
from xtrax.sparse._masks import apply_masks, largest
from xtrax.sparse._policy import SparsePolicy
from xtrax.sparse._prune import prune_structured
from xtrax.sparse._report import PruneReport
from xtrax.sparse.inference import make_sparse_forward_fn, sparsify_model

Form = Literal["dense", "masked", "bcoo", "structured"]

# A form must take at most this share of the dense model's time to be worth what it changes in the outputs.
_WORTH_IT = 0.95
# A form whose first timed call takes this many times the dense model's is out of the race, and timed no more.
_HOPELESS = 5
# What is timed at once, far above the clock's resolution.
_BATCH_SECONDS = 0.002


@dataclass(frozen=True)
class Timing:
    """One form of the model, measured.

    Args:
        form: `"dense"`, `"masked"` (dense with zeros), `"bcoo"`, or `"structured"` (smaller and dense).
        seconds: Median time of a call.
        ratio: That time in units of the dense model's.
        bytes: Bytes of its arrays.
        change: Norm of the change of the outputs, relative to the norm of the dense outputs.
    """

    form: Form
    seconds: float
    ratio: float
    bytes: int
    change: float


@dataclass(frozen=True)
class RepresentationReport:
    """What `choose_representation` measured. `str(report)` is a table with the advice.

    Args:
        device: The device it was measured on.
        density: The share of weights, or of units, that was kept.
        timings: One for each form, dense first.
        best: The fastest form, or `"dense"` if none takes less than 0.95 of the dense model's time. Never `"masked"`:
            it runs the very program of the dense model, and a difference between the two is the measurement's noise,
            which a form must beat too.
        model: The model in that form.
        prune_report: What structured pruning removed and left alone; `None` if there was nothing it could remove.
    """

    device: str
    density: float
    timings: tuple[Timing, ...]
    best: Form
    model: Any
    prune_report: PruneReport | None

    def __str__(self) -> str:
        """The report as text."""
        lines = [
            f"{self.device}, density {self.density:g}",
            "form        time/call   of dense      memory  change of outputs",
        ]
        for t in self.timings:
            lines.append(
                f"{t.form:<10}{t.seconds * 1e6:>9.0f} us{t.ratio:>10.2f}x{t.bytes / 1e6:>9.2f} MB{t.change:>19.1%}"
            )
        masked = next(t for t in self.timings if t.form == "masked")
        lines.append(f"masked runs the same program as dense: {masked.ratio:.2f}x is the noise of this measurement")
        if self.best == "dense":
            lines.append("use the dense model: no other form is clearly faster here")
        else:
            best = next(t for t in self.timings if t.form == self.best)
            lines.append(
                f"use {self.best}: {1 / best.ratio:.2f} times as fast as dense; check the change of the outputs"
            )
        if self.prune_report is None:
            lines.append("structured: there are no units that prune_structured can remove")
        return "\n".join(lines)


def choose_representation(
    model: Any,
    sample_inputs: Any,
    *,
    density: float = 0.5,
    forward: Callable[..., Any] | None = None,
    repeats: int = 9,
) -> RepresentationReport:
    """Time a model dense, masked, in BCOO form and pruned structurally, and say which to use on this device.

    Masking saves no time on any current backend, and a BCOO product is often slower than the dense one: the report
    says so with figures. Structured pruning keeps a share `density` of the *units*, the other two of the *weights* of
    each matrix; the change of the outputs that each costs, before any retraining, is in the report.

    Args:
        model: A dense Equinox model, or any pytree with `forward`. Layers run in inference mode.
        sample_inputs: An argument, or a tuple of arguments, as the model is called with; concrete arrays, as large as
            in real use, for time depends on them.
        density: Share that stays, above 0 and below 1.
        forward: `forward(model, *sample_inputs)`, if the model is not called as `model(*sample_inputs)`; a batch needs
            `lambda model, x: jax.vmap(model)(x)`.
        repeats: Timed calls of each form, taken in turn (for short calls, of batches of them); at least 3. A form
            that takes more than 5 times the dense model's time at first is timed once.

    Returns:
        A `RepresentationReport`; its `model` is the model in the recommended form.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `density` or `repeats` is out of range, the model has no matrix, or cannot be
            called with the sample.
        RuntimeError: Called inside a JAX trace.

    >>> model = eqx.nn.MLP(32, 8, width_size=64, depth=2, key=jax.random.key(0))
    >>> batch = jnp.ones((16, 32))
    >>> report = choose_representation(model, batch, forward=lambda model, x: jax.vmap(model)(x), repeats=3)
    >>> [timing.form for timing in report.timings]
    ['dense', 'masked', 'bcoo', 'structured']
    """
    check_outside_trace("choose_representation", "it times compiled calls: call it before jit", (model, sample_inputs))
    density = as_fraction("density", density, one_allowed=False)
    repeats = as_int("repeats", repeats, minimum=3)
    call = _call if forward is None else forward
    check_callable("forward", call, "forward(model, *sample_inputs)")
    arguments = sample_inputs if isinstance(sample_inputs, tuple) else (sample_inputs,)
    model = eqx.nn.inference_mode(model)

    weights = matrices(model, eqx.is_array)
    policy = SparsePolicy.for_model(model, density)
    budgets = policy.leaf_budgets or {}
    forms: dict[Form, Any] = {"dense": model}
    forms["masked"] = apply_masks(model, {path: largest(w, budgets[path]) for path, w in weights.items()})
    with warnings.catch_warnings():
        # Which leaves stay dense is not news here: the question is the time of the whole.
        warnings.filterwarnings("ignore", message="sparsify_model left")
        forms["bcoo"] = sparsify_model(model, policy)
    smaller, prune_report = prune_structured(model, fraction=1 - density, sample=arguments, forward=forward)
    if prune_report.groups:
        forms["structured"] = smaller

    runs = {form: make_sparse_forward_fn(lambda m, args: call(m, *args), tree) for form, tree in forms.items()}
    outputs = {form: jax.block_until_ready(run(arguments)) for form, run in runs.items()}
    times = {form: [_time(run, arguments)] for form, run in runs.items()}
    calls = max(1, round(_BATCH_SECONDS / times["dense"][0]))
    racing = [form for form in runs if times[form][0] < _HOPELESS * times["dense"][0]]
    times |= {form: [] for form in racing}
    for _ in range(repeats):
        for form in racing:
            _time(runs[form], arguments)  # so that what ran before, another form, does not count
            times[form].append(_time(runs[form], arguments, calls))

    seconds = {form: statistics.median(taken) for form, taken in times.items()}
    timings = tuple(
        Timing(
            form,
            seconds[form],
            seconds[form] / seconds["dense"],
            sum(leaf.nbytes for leaf in jax.tree.leaves(forms[form]) if eqx.is_array(leaf)),
            _change(outputs[form], outputs["dense"]),
        )
        for form in forms
    )
    best = _best(seconds)
    device = jax.tree.leaves(outputs["dense"])[0].devices().pop()
    return RepresentationReport(
        device=f"{device.platform} ({device.device_kind})",
        density=density,
        timings=timings,
        best=best,
        model=forms[best],
        prune_report=prune_report if prune_report.groups else None,
    )


def _best(seconds: Mapping[Form, float]) -> Form:
    """The fastest form that beats the program of the dense model, which is timed twice, as dense and as masked."""
    dense = min(seconds["dense"], seconds["masked"])
    faster = {form: taken for form, taken in seconds.items() if taken < _WORTH_IT * dense and form != "masked"}
    return min(faster, key=lambda form: faster[form], default="dense")


def _call(model: Any, *arguments: Any) -> Any:
    return model(*arguments)


def _time(run: Callable[[Any], Any], arguments: Any, calls: int = 1) -> float:
    """Seconds that a call takes, until its outputs are ready."""
    outputs = None
    start = time.perf_counter()
    for _ in range(calls):
        outputs = run(arguments)
    jax.block_until_ready(outputs)
    return (time.perf_counter() - start) / calls


def _change(outputs: Any, dense: Any) -> float:
    """The relative norm of the change over all floating-point outputs."""
    pairs = [
        (a, b)
        for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(dense), strict=True)
        if jnp.issubdtype(b.dtype, jnp.inexact)
    ]
    moved = sum(float(jnp.sum(jnp.abs(a - b) ** 2)) for a, b in pairs)
    size = sum(float(jnp.sum(jnp.abs(b) ** 2)) for _, b in pairs)
    return (moved / size) ** 0.5 if size else float(moved > 0)
