"""Score 32,000 ragged recordings, most of them copies, by eight models in 64 MB: plan, reasons, and what it saved.

python docs/examples/vowels/under_a_budget.py
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from vowels import DATA, Classifier, cross_entropy, read

from xtrax.tiling import (
    AxisSpec,
    BatchPlanner,
    MemoryBudget,
    RemainderWarning,
    bucketize,
    execute_plan,
    lowered_memory_estimate,
    padding_waste,
    suggest_boundaries,
)

COPIES = 50
MEMBERS = 8
BUDGET = 64_000_000


def main() -> None:
    """Run the example and print what it finds."""
    train, test = read(DATA)
    steps = np.concatenate(train.values)
    normal = [(x - steps.mean(axis=0)) / steps.std(axis=0) for x in (*train.values, *test.values)]
    params, static = fitted(padded(normal[: len(train.values)], max(map(len, normal))), train.speakers)
    recordings = normal * COPIES
    speakers = np.tile(np.concatenate([train.speakers, test.speakers]), COPIES)

    def logits(member: Any, recording: dict[str, Any]) -> jax.Array:
        """The logits, `(9,)`, of one model for one recording: what is mapped over both axes."""
        return eqx.combine(member, static)(recording)

    lengths = np.array([len(recording) for recording in recordings])
    boundaries = suggest_boundaries(lengths, 3)
    print(f"{len(recordings)} recordings of {lengths.min()} to {lengths.max()} steps, {MEMBERS} models")
    print(f"padded to {boundaries}, {padding_waste(lengths, boundaries):.0%} of the elements are padding; ", end="")
    print(f"to the longest alone, {padding_waste(lengths, (lengths.max(),)):.0%}\n")

    started, planned, peak, planning = time.monotonic(), np.zeros((MEMBERS, len(recordings), 9), np.float32), 0, 0
    for low, high in zip((0, *boundaries), boundaries, strict=False):
        members = np.flatnonzero((lengths > low) & (lengths <= high))
        group = padded([recordings[i] for i in members], high)
        axes = [("member",), ("recording",)]
        specs = [
            AxisSpec("member", MEMBERS, default_batch_size=1),
            AxisSpec("recording", len(members), default_batch_size=512, dedup_eligible=True),
        ]
        budget = MemoryBudget.for_function(logits, params, group, axes=axes, bytes=BUDGET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RemainderWarning)
            plan = BatchPlanner(budget=budget).plan(specs, data={"recording": group})
        print(plan, end="\n\n")
        planned[:, members] = execute_plan(logits, plan, params, group, axes=axes)
        assert plan.memory is not None
        peak, planning = max(peak, plan.memory.estimate), planning + plan.memory.compiles
    seconds = time.monotonic() - started

    naive, naive_seconds, programs = one_by_one(logits, params, recordings)
    np.testing.assert_allclose(planned, naive, rtol=1e-4, atol=1e-4)
    right = (planned.mean(axis=0).argmax(axis=-1) == speakers).mean()
    whole = padded(recordings, int(lengths.max()))
    at_once = lowered_memory_estimate(over_both(logits), params, whole)

    print(f"{'way':<32}{'programs':>9}{'seconds':>9}{'MB':>7}")
    print(f"{'one by one, jit per length':<32}{programs:>9}{naive_seconds:>9.1f}{'':>7}")
    print(f"{'padded to the longest, jax.vmap':<32}{1:>9}{'':>9}{at_once / 1e6:>7.0f}")
    print(f"{'planned':<32}{len(boundaries):>9}{seconds:>9.1f}{peak / 1e6:>7.0f}")
    print(f"\n{planning} more programs were compiled to plan. MB are those of XLA's account, with inputs and outputs.")
    print(f"The planned results are those of the loop; {right:.1%} of the recordings get the right speaker.")


def padded(recordings: list[np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Recordings as the model takes them: `values` `(n, length, 12)` and `mask` `(n, length)`."""
    pairs = [bucketize(recording, length) for recording in recordings]
    return {"values": np.stack([values for values, _ in pairs]), "mask": np.stack([mask for _, mask in pairs])}


def fitted(inputs: dict[str, np.ndarray], speakers: np.ndarray, steps: int = 40) -> tuple[Any, Any]:
    """The arrays of the models, each leaf `(MEMBERS, ...)`, after some steps of training, and what is no array."""
    models = eqx.filter_vmap(lambda key: Classifier(hidden=64, key=key))(jax.random.split(jax.random.key(0), MEMBERS))
    params, static = eqx.partition(models, eqx.is_array)
    optimizer = optax.adam(1e-2)

    def loss(member: Any) -> jax.Array:
        return cross_entropy(jax.vmap(eqx.combine(member, static))(inputs), speakers).mean()

    def step(carry: Any, _: None) -> Any:
        member, state = carry
        updates, state = optimizer.update(jax.grad(loss)(member), state)
        return (optax.apply_updates(member, updates), state), None

    @jax.jit
    @jax.vmap
    def fit(member: Any) -> Any:
        return jax.lax.scan(step, (member, optimizer.init(member)), None, steps)[0][0]

    return fit(params), static


def over_both(logits: Callable[..., Any]) -> Callable[..., Any]:
    """The function mapped over models and recordings, all at once."""
    return jax.vmap(jax.vmap(logits, in_axes=(None, 0)), in_axes=(0, None))


def one_by_one(logits: Callable[..., Any], params: Any, recordings: list[np.ndarray]) -> tuple[np.ndarray, float, int]:
    """What a plain loop over the recordings yields, `(MEMBERS, n, 9)`, its seconds and its programs."""
    started = time.monotonic()
    of_recording = jax.jit(jax.vmap(logits, in_axes=(0, None)))
    results = [of_recording(params, {"values": x, "mask": np.ones(len(x), bool)}) for x in recordings]
    stacked = np.stack(jax.device_get(results), axis=1)
    return stacked, time.monotonic() - started, len({len(x) for x in recordings})


if __name__ == "__main__":
    main()
