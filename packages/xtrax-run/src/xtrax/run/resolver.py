"""How a domain library turns a run's description into what its model eats."""

from typing import Any, NewType, Protocol, runtime_checkable

import equinox as eqx

from xtrax.run.spec import RunSpec

FeatureBatch = NewType("FeatureBatch", dict[str, Any])
"""Named features of a batch: arrays, or trees of them, by name."""


class RuntimeBundle(eqx.Module):
    """What a run needs besides its description.

    Args:
        iterator: Maps a function over the run's axes, as `make_axis_dispatch` returns it; or an iterator of batches.
        model: The model, a tree of arrays such as an `eqx.Module`.

    Examples:
        >>> import jax
        >>> bundle = RuntimeBundle(iterator=jax.vmap, model={"w": jax.numpy.ones(3)})
        >>> bundle.model["w"].shape
        (3,)
    """

    iterator: Any
    model: Any


@runtime_checkable
class InputResolver(Protocol):
    """Any callable `(spec, bundle) -> FeatureBatch`: reads what the spec names and shapes it for the model.

    Examples:
        >>> import jax
        >>> from xtrax.run.spec import RunSpec
        >>> def resolve(spec: RunSpec, bundle: RuntimeBundle) -> FeatureBatch:
        ...     noise = jax.random.normal(jax.random.key(spec.seed), (4,))
        ...     return FeatureBatch({"noise": noise * bundle.model["scale"]})
        >>> isinstance(resolve, InputResolver)
        True
        >>> batch = resolve(RunSpec(seed=0, axes=[]), RuntimeBundle(None, {"scale": 2.0}))
        >>> batch["noise"].shape
        (4,)
    """

    def __call__(self, spec: RunSpec, bundle: RuntimeBundle, /) -> FeatureBatch:
        """Return the features that the spec asks for."""
        ...
