"""How the engine lays states and batches out on a mesh."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from xtrax.training._sharding import LogicalMesh, ShardingPolicy, put
from xtrax.training._state import StateSpec

logger = logging.getLogger("xtrax.training")

_T = TypeVar("_T")


@dataclass(frozen=True)
class Placement:
    """Batches are split along their leading axis over some axes of a mesh, states by a policy.

    Args:
        mesh: with axes of type Auto.
        batch_axes: the mesh axes that batches are split over.
        policy: of the model and the optimizer's state; None keeps them whole on every device.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    policy: ShardingPolicy | None
    _known: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    _warned: set[int] = field(default_factory=set, init=False, repr=False, compare=False)

    def place(self, spec: StateSpec, arrays: list[Any]) -> list[jax.Array]:
        """The arrays of a state, on the mesh."""
        return [put(leaf, to) for leaf, to in zip(arrays, self._shardings(spec, arrays), strict=True)]

    def constrain(self, spec: StateSpec, arrays: list[Any]) -> list[jax.Array]:
        """The same inside a traced function."""
        return jax.lax.with_sharding_constraint(arrays, self._shardings(spec, arrays))

    def replicated(self, tree: _T) -> _T:
        """What every process can read, inside a traced function."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), tree)

    def place_replicated(self, leaf: jax.Array) -> jax.Array:
        """An array, whole on every device."""
        return put(leaf, NamedSharding(self.mesh, PartitionSpec()))

    def place_batch(self, batch: Any, *, stacked: bool = False) -> Any:
        """A batch, or several stacked along a new leading axis, on the mesh.

        One whose number of examples the mesh does not divide is computed whole on every device: the numbers are the
        same.
        """
        axis = 1 if stacked else 0
        n = jax.tree.leaves(batch)[0].shape[axis]
        parts = math.prod(self.mesh.shape[name] for name in self.batch_axes)
        spec = PartitionSpec(*[None] * axis, self.batch_axes)
        if n % parts:
            spec = PartitionSpec()
            if n not in self._warned:
                self._warned.add(n)
                logger.warning("a batch of %d examples is not split: %d devices do not divide it", n, parts)
        return jax.tree.map(lambda leaf: put(leaf, NamedSharding(self.mesh, spec)), batch)

    def _shardings(self, spec: StateSpec, arrays: list[Any]) -> list[NamedSharding]:
        shapes = [leaf.shape for leaf in arrays]
        for known, known_shapes, shardings in self._known:
            if known is spec and known_shapes == shapes:
                return shardings
        whole = NamedSharding(self.mesh, PartitionSpec())
        if self.policy is None:
            shardings = [whole] * len(arrays)
        else:
            state = spec.state([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays])
            # The step and the key are of the run, not of the model: no rule is asked about them.
            asked = {"model": state.model, "opt_state": state.opt_state, "extras": state.extras}
            placed = self.policy.shardings(asked, self.mesh)
            shardings = [whole, whole, *jax.tree.leaves([placed[name] for name in asked])]
        self._known.append((spec, shapes, shardings))
        return shardings


def make_placement(mesh: Mesh | LogicalMesh | None, policy: ShardingPolicy | None) -> Placement | None:
    """What `Engine` is told of devices.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a policy without a mesh, or a `LogicalMesh` without a rule for "batch".
    """
    if policy is not None and not isinstance(policy, ShardingPolicy):
        raise TypeError(f"sharding must be a ShardingPolicy or None, got {policy!r}")
    if mesh is None:
        if policy is not None:
            raise ValueError("sharding needs a mesh; pass mesh=get_device_mesh(...) too")
        return None
    if isinstance(mesh, LogicalMesh):
        if "batch" not in mesh.rules:
            raise ValueError(f'the rules of a LogicalMesh must have "batch", got {sorted(mesh.rules)}')
        mesh, axes = mesh.mesh, mesh.rules["batch"]
    elif isinstance(mesh, Mesh):
        axes = mesh.axis_names[:1]
    else:
        raise TypeError(f"mesh must be a jax.sharding.Mesh or a LogicalMesh, got {mesh!r}")
    # Models are written without a word on sharding, which axes of type Explicit would ask them for.
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return Placement(auto, axes, policy)
