"""Which axes of an output are the length that an element was padded to, and so are cut back to its own."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

_log = logging.getLogger("xtrax.tiling")


def length_axes(
    outputs: Any, length: int, run: Callable[[int], Any], others: Sequence[int], name: str = "output"
) -> list[tuple[int, ...]]:
    """For each leaf of the outputs, the axes that are the length, told from those of that size by coincidence.

    Args:
        outputs: the abstract outputs at `length`.
        length: what is padded to.
        run: from a length to the abstract outputs.
        others: other lengths to compare with. The first that `run` takes without raising decides; if there is none, no
            axis is said to be the length.
        name: what messages call the outputs.

    Raises:
        ValueError: outputs that depend on the length in another way, so that their padding cannot be cut off.
    """
    for other in others:
        try:
            compared = run(other)
        except Exception as error:  # noqa: BLE001 - that a function takes no other length is an answer, not a failure
            _log.debug("fn takes length %d, but not %d: %s", length, other, error)
            continue
        named, structure = jax.tree_util.tree_flatten_with_path(outputs)
        there, other_structure = jax.tree.flatten(compared)
        if structure != other_structure:
            raise ValueError(
                f"fn returns {structure} of an element that is padded to {length}, but {other_structure} of one that "
                f"is padded to {other}, so what comes from the padding cannot be cut off; {_CURE}."
            )
        return [
            _axes(f"{name}{jax.tree_util.keystr(path)}".lstrip("."), leaf.shape, length, compared_leaf.shape, other)
            for (path, leaf), compared_leaf in zip(named, there, strict=True)
        ]
    return [()] * len(jax.tree.leaves(outputs))


_CURE = (
    "return arrays whose axes have the padded length itself (pad what is shorter), or a size that does not depend on "
    "it (such as a sum over what the mask lets through)"
)


def _axes(where: str, shape: tuple[int, ...], length: int, other_shape: tuple[int, ...], other: int) -> tuple[int, ...]:
    cut = []
    alike = len(shape) == len(other_shape)
    for axis, sizes in enumerate(zip(shape, other_shape, strict=False)):
        if sizes == (length, other):
            cut.append(axis)
        else:
            alike = alike and sizes[0] == sizes[1]
    if not alike:
        raise ValueError(
            f"{where} has shape {shape} of an element that is padded to {length}, but {other_shape} of one that is "
            f"padded to {other}: it follows the length without having it as an axis, so what comes from the padding "
            f"cannot be cut off; {_CURE}."
        )
    return tuple(cut)
