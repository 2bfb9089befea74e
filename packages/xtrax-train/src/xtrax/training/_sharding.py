"""Where the leaves of a state lie on a mesh."""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xtrax.training._checks import check_int
from xtrax.training._paths import PathRules, path_text

logger = logging.getLogger("xtrax.training")

_WHOLE = PartitionSpec()

Axes = str | tuple[str, ...] | None


class ShardingPolicy:
    """Which axes of which leaves are split over which axes of a mesh.

    The paths of a training state are those of its model and of the optimizer's state, such as
    `model/layers/0/weight` and `opt_state/0/mu/layers/0/weight`, so one pattern fits a parameter and its moments.

    Args:
        rules: regular expressions to partition specs. A leaf gets the spec of the first that is found in its path,
            whose parts stand between slashes. Leaves of shape `()` need no rule.
        default: the spec of leaves that no rule fits, whole on every device unless told otherwise; None refuses them.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a bad expression.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec
        >>> from xtrax.training import ShardingPolicy
        >>> policy = ShardingPolicy({"weight$": PartitionSpec("data")})
        >>> params = {"weight": jnp.ones((8, 2)), "bias": jnp.ones(8)}
        >>> policy.unmatched(params)
        ('bias',)
    """

    def __init__(self, rules: Mapping[str, PartitionSpec], *, default: PartitionSpec | None = _WHOLE):
        self._rules = PathRules("rules", rules)
        for pattern, spec in rules.items():
            if not isinstance(spec, PartitionSpec):
                raise TypeError(f"rules: {pattern!r} must be given a jax.sharding.PartitionSpec, got {spec!r}")
        if default is not None and not isinstance(default, PartitionSpec):
            raise TypeError(f"default must be a jax.sharding.PartitionSpec or None, got {default!r}")
        self.rules = dict(rules)
        self.default = default

    @classmethod
    def fsdp(cls, tree: Any, mesh: Mesh, axis: str, *, min_size: int = 1024) -> "ShardingPolicy":
        """Fully sharded: each large leaf is split along its longest axis that the mesh axis divides.

        Args:
            tree: the state to be trained, or any pytree of arrays.
            mesh: the mesh.
            axis: the mesh axis to split over, as a rule the one that batches are split over.
            min_size: leaves with fewer elements stay whole.

        Returns:
            A policy with one rule for each leaf of at least one axis.

        Raises:
            TypeError: an argument of the wrong kind.
            ValueError: `mesh` has no such axis, or `min_size` is below 1.
        """
        _check_mesh(mesh)
        if axis not in mesh.axis_names:
            raise ValueError(f"axis must be one of the mesh, {mesh.axis_names}, got {axis!r}")
        check_int("min_size", min_size, at_least=1)
        parts = mesh.shape[axis]
        rules = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if not _is_array(leaf) or not leaf.shape:
                continue
            candidates = [i for i, n in enumerate(leaf.shape) if n and n % parts == 0]
            spec = PartitionSpec()
            if candidates and math.prod(leaf.shape) >= min_size:
                longest = max(candidates, key=lambda i: leaf.shape[i])
                spec = PartitionSpec(*[None] * longest, axis)
            rules[f"^{re.escape(path_text(path))}$"] = spec
        return cls(rules)

    def specs(self, tree: Any) -> Any:
        """The partition spec of each array of a tree; None in place of what is not an array.

        Raises:
            ValueError: a leaf that no rule fits, if `default` is None, or one with fewer axes than its spec.
        """
        specs = {path: spec for path, spec, _ in self._match(tree)}
        return jax.tree_util.tree_map_with_path(lambda path, _: specs.get(path_text(path)), tree)

    def shardings(self, tree: Any, mesh: Mesh) -> Any:
        """The sharding of each array of a tree; None in place of what is not an array.

        Leaves that no rule fits are logged as a warning.

        Raises:
            TypeError: `mesh` is not a mesh.
            ValueError: as for `specs`; an unknown mesh axis; or an axis of a leaf that the mesh does not divide.
        """
        _check_mesh(mesh)
        shapes = {path_text(path): leaf.shape for path, leaf in _arrays(tree)}
        matched = {}
        for path, spec, _ in self._match(tree):
            _check_spec(path, shapes[path], spec, mesh)
            matched[path] = NamedSharding(mesh, spec)
        if unmatched := self.unmatched(tree):
            logger.warning(
                "no sharding rule fits %d of %d leaves, which get %s: %s",
                len(unmatched),
                len(matched),
                self.default,
                ", ".join(unmatched[:10]) + (", ..." if len(unmatched) > 10 else ""),
            )
        return jax.tree_util.tree_map_with_path(lambda path, _: matched.get(path_text(path)), tree)

    def place(self, tree: Any, mesh: Mesh) -> Any:
        """The tree with its arrays on the mesh.

        Raises:
            TypeError: `mesh` is not a mesh.
            ValueError: as for `shardings`.
        """
        shardings = self.shardings(tree, mesh)
        return jax.tree.map(
            lambda leaf, sharding: leaf if sharding is None else put(leaf, sharding),
            tree,
            shardings,
            is_leaf=lambda leaf: leaf is None,
        )

    def unmatched(self, tree: Any) -> tuple[str, ...]:
        """The paths of the arrays, of at least one axis, that no rule fits."""
        return tuple(path for path, _, pattern in self._match(tree, strict=False) if pattern is None)

    def __repr__(self) -> str:
        return f"ShardingPolicy({self.rules!r}, default={self.default!r})"

    def _match(self, tree: Any, *, strict: bool = True) -> Iterator[tuple[str, PartitionSpec, str | None]]:
        """For each array its path, its spec, and the pattern that gave it ("" for one of shape ())."""
        missing = []
        for path, leaf in _arrays(tree):
            text = path_text(path)
            if not leaf.shape:
                yield text, PartitionSpec(), ""
                continue
            found = self._rules.find(text)
            pattern, spec = (None, self.default) if found is None else found
            if spec is None:
                missing.append(text)
                spec = PartitionSpec()
            elif len(spec) > len(leaf.shape):
                raise ValueError(f"{text} has shape {leaf.shape}, fewer axes than its spec {spec} of rule {pattern!r}")
            yield text, spec, pattern
        if missing and strict:
            raise ValueError(f"no sharding rule fits {', '.join(missing)}; add a rule, or give a default")


class LogicalMesh:
    """A mesh whose axes are asked for by what they are for, such as "batch" or "embed".

    So a model says what its axes mean, and one table says where they go on this machine.

    Args:
        mesh: the devices.
        rules: each logical axis to the mesh axis, or axes, that it is split over; None for none.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a mesh axis that there is not, or one that is named twice in a rule.

    Example:
        >>> from xtrax.training import LogicalMesh, get_device_mesh
        >>> mesh = get_device_mesh((1, 1), ("data", "model"))
        >>> logical = LogicalMesh(mesh, {"batch": "data", "hidden": "model", "time": None})
        >>> tuple(logical.spec("batch", "time", "hidden"))
        ('data', None, 'model')
    """

    def __init__(self, mesh: Mesh, rules: Mapping[str, Axes]):
        _check_mesh(mesh)
        if not isinstance(rules, Mapping):
            raise TypeError(f"rules must be a dict by logical axis, got {type(rules).__name__}")
        self.mesh = mesh
        self.rules: dict[str, tuple[str, ...]] = {}
        for name, axes in rules.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"rules: a logical axis must be a name, got {name!r}")
            if not isinstance(axes, str | tuple | None):
                raise TypeError(f"rules[{name!r}] must be a mesh axis, a tuple of them or None, got {axes!r}")
            parts = () if axes is None else (axes,) if isinstance(axes, str) else axes
            if unknown := [axis for axis in parts if axis not in mesh.axis_names]:
                raise ValueError(f"rules[{name!r}] names {unknown}, and the mesh has the axes {mesh.axis_names}")
            if len(set(parts)) < len(parts):
                raise ValueError(f"rules[{name!r}] names a mesh axis twice: {parts}")
            self.rules[name] = parts

    def axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over.

        Raises:
            ValueError: there is no such logical axis.
        """
        if name not in self.rules:
            raise ValueError(f"there is no logical axis {name!r}; there are {sorted(self.rules)}")
        return self.rules[name]

    def size(self, name: str) -> int:
        """The number of parts that a logical axis is split into.

        Raises:
            ValueError: there is no such logical axis.
        """
        return math.prod(self.mesh.shape[axis] for axis in self.axes(name))

    def spec(self, *names: str | None) -> PartitionSpec:
        """The partition spec of an array with these logical axes, None for one that is not split.

        Raises:
            ValueError: there is no such logical axis, or two of them are split over the same mesh axis.
        """
        entries: list[Axes] = []
        used: dict[str, str] = {}
        for name in names:
            axes = () if name is None else self.axes(name)
            for axis in axes:
                if axis in used:
                    raise ValueError(
                        f"the logical axes {used[axis]!r} and {name!r} are both split over the mesh axis {axis!r}"
                    )
                used[axis] = str(name)
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*entries)

    def sharding(self, *names: str | None) -> NamedSharding:
        """The sharding of an array with these logical axes.

        Raises:
            ValueError: as for `spec`.
        """
        return NamedSharding(self.mesh, self.spec(*names))

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """`x`, laid out by its logical axes; for use inside a model.

        Raises:
            ValueError: as for `spec`, or another number of names than `x` has axes.
        """
        if len(names) != x.ndim:
            raise ValueError(f"x has shape {x.shape}, and {len(names)} logical axes are named: {names}")
        return jax.lax.with_sharding_constraint(x, self.sharding(*names))

    def __repr__(self) -> str:
        return f"LogicalMesh({dict(self.mesh.shape)}, {self.rules})"


def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array with this sharding; where the mesh spans processes, each has the whole of `leaf` and keeps its part."""
    if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
        return leaf
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(leaf)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _arrays(tree: Any) -> list[tuple[Any, Any]]:
    return [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if _is_array(leaf)]


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, such as get_device_mesh makes, got {mesh!r}")


def _check_spec(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    for i, entry in enumerate(spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        if unknown := [axis for axis in axes if axis not in mesh.axis_names]:
            raise ValueError(f"{path}: {spec} names {unknown}, and the mesh has the axes {mesh.axis_names}")
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if shape[i] % parts:
            raise ValueError(
                f"{path}: axis {i} has length {shape[i]}, which {parts} devices of {axes} do not divide; choose "
                "another axis or another mesh"
            )
