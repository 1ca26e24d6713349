"""Records and tensors -> the plain values that `json.dumps` takes."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def plain_record(record: DataclassInstance) -> dict[str, Any]:
    """Return the fields of a flat record by name; tuples as the lists that JSON would make of them."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def plain_numbers(values: Tensor) -> list[Any]:
    """Return a vector's numbers; None stands for NaN, which JSON does not have: nothing was measured there."""
    return [None if value != value else value for value in values.tolist()]
