"""The axes of a function's inputs, and the schema of its outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from xtrax.inference._annotations import dimension_names
from xtrax.inference._inputs import Arguments, abstract_arguments, abstract_result, name_of
from xtrax.inference._override import AxisOverride, overrides_of
from xtrax.inference._schema import BundleSchema, name_outputs
from xtrax.inference._verify import verify_structure
from xtrax.tiling import AxisRole, AxisSpec
from xtrax.tiling._split import type_text


def infer_bundle(
    fn: Callable[..., Any], abstract_inputs: Any, *, verify_against: Any = None
) -> tuple[BundleSchema, list[AxisSpec]]:
    """What axes a function's inputs have, and what arrays it returns. Nothing is computed.

    Each input leaf with at least one dimension has an axis, its leading one. Axes are named, in this order, by
    `@axis_config`, by a jaxtyping annotation of the argument, or `axis_<i>` for the i-th leaf that has one. Arguments
    whose axes share a name have one axis. Those that `@axis_config` names are of role `KNOWN`; the others are
    `UNKNOWN`, since a signature does not say whether elements are independent, and all their elements are one batch.

    Args:
        fn: a function of a batch: the shapes carry the leading axes.
        abstract_inputs: a list or tuple with one entry for each argument, a dict of the parameters' names, or the only
            argument. Entries are pytrees whose leaves are `jax.ShapeDtypeStruct`, arrays, or `(shape, dtype)`.
        verify_against: concrete inputs in the same form, for `verify_structure`.

    Returns:
        The schema of the outputs, and one `AxisSpec` for each axis, in the order of the inputs.

    Raises:
        TypeError: `fn` is not callable or takes another number of arguments, or a leaf has no shape and dtype.
        ValueError: more overrides than axes, axes or annotated dimensions of one name that differ in size, or two
            outputs of one name.
        StructureMismatchError: `verify_against` gives another result than the abstract inputs.

    >>> from xtrax.inference import AxisOverride, axis_config
    >>> @axis_config(AxisOverride("batch", default_batch_size=32))
    ... def model(x):
    ...     return {"mean": x.mean(axis=1), "scaled": 2 * x}
    >>> schema, axes = infer_bundle(model, [((100, 8), "float32")])
    >>> {name: field.shape for name, field in schema.fields.items()}
    {'mean': (100,), 'scaled': (100, 8)}
    >>> axes[0].name, axes[0].cardinality, axes[0].role
    ('batch', 100, <AxisRole.KNOWN: 'known'>)
    """
    arguments = abstract_arguments(fn, abstract_inputs)
    leading = _leading_axes(fn, arguments)
    overrides = overrides_of(fn)
    if len(overrides) > len(leading):
        raise ValueError(
            f"{name_of(fn)} has {len(overrides)} axis overrides, the last one for {overrides[-1].name!r}, but its "
            f"inputs have {len(leading)} leading axes; give one for each, by position."
        )
    axes = _merge(leading, overrides)
    schema = BundleSchema(name_outputs(abstract_result(fn, arguments)))
    if verify_against is not None:
        verify_structure(fn, abstract_inputs, verify_against)
    return schema, axes


@dataclasses.dataclass(frozen=True)
class _Leading:
    """The leading axis of one input leaf."""

    label: str
    leaf: jax.ShapeDtypeStruct
    name: str

    def __str__(self) -> str:
        return f"{self.label} {type_text(self.leaf)}"


def _leading_axes(fn: Callable[..., Any], arguments: Arguments) -> list[_Leading]:
    """In the order of the inputs, with the name that the annotation gives, or ""."""
    leading: list[_Leading] = []
    names = dimension_names(fn, arguments)
    for (label, value), words in zip(arguments.labelled(), names, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(value)[0]:
            if leaf.shape:
                where = f"abstract_inputs{label}{jax.tree_util.keystr(path)}"
                leading.append(_Leading(where, leaf, words[0] if words else ""))
    return leading


def _merge(leading: list[_Leading], overrides: tuple[AxisOverride, ...]) -> list[AxisSpec]:
    """One spec for each name, in the order in which the names occur."""
    by_name = {override.name: override for override in overrides}
    members: dict[str, list[_Leading]] = {}
    unnamed: set[str] = set()
    for i, axis in enumerate(leading):
        name = overrides[i].name if i < len(overrides) else axis.name
        if not name:
            name = f"axis_{i}"
            unnamed.add(name)
        members.setdefault(name, []).append(axis)
    axes: list[AxisSpec] = []
    for name, group in members.items():
        if name in unnamed and len(group) > 1:
            raise ValueError(
                f"{group[0]} and {group[1]} would both have the axis {name!r}, which is the name of an axis without "
                "one; choose another name."
            )
        for other in group[1:]:
            if other.leaf.shape[0] != group[0].leaf.shape[0]:
                raise ValueError(f"axis {name!r} has differing sizes: {group[0]} and {other}; a name is for one axis.")
        size = group[0].leaf.shape[0]
        if name in by_name:
            axes.append(by_name[name].to_spec(size))
        else:
            axes.append(AxisSpec(name, size, max(size, 1), role=AxisRole.UNKNOWN))
    return axes
