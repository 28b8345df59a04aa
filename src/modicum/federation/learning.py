"""What an experiment learns: its task, held against its records, its model and its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace

import numpy as np
import torch

from modicum.core.parts import Batch, Method
from modicum.core.persons import Slot
from modicum.core.records import Field, Fields, each, leaves
from modicum.data.arrays import Arrays, FederatedData
from modicum.data.persons import grouped, present_rows
from modicum.errors import UserError
from modicum.models.named import is_shipped
from modicum.privacy.spec import Unit
from modicum.tasks import Labels, Task
from modicum.tasks.persons import of_persons as task_of_persons
from modicum.tasks.persons import row_label

MADE_UP = 32  # rows that a model is tried on


def with_task(method: Method, task: Task) -> Method:
    """The method with the task's loss in its local training; refused where the method has a loss of its own."""
    if task.usual and not task.of_persons:
        return method
    training = method.training
    if not is_dataclass(training) or "task" not in {f.name for f in fields(training)}:
        raise UserError(
            f"{method.name} has a loss of its own for the classes of single records: set the task to "
            "classification without weights, leave persons out, or use another method, e.g. dp-sgd"
        )
    return replace(method, training=replace(training, task=task))


def of_persons(method: Method, slot: Slot) -> Method:
    """The method with persons, not records, as the unit of what it protects (R18)."""
    mechanism = method.mechanism
    if not is_dataclass(mechanism) or "unit" not in {f.name for f in fields(mechanism)}:
        if mechanism.spec.unit is Unit.CLIENT:
            raise UserError(
                f"{method.name} protects whole clients, and all their persons with them: leave unit and person "
                "out, or use a method for records, e.g. dp-sgd"
            )
        raise UserError(f"{method.name} releases more than gradients of single records: for persons use dp-sgd")
    mechanism = replace(mechanism, unit=Unit.PERSON)
    return replace(method, mechanism=mechanism, notes=(*method.notes, slot.sentence()))


def learned_by(task: Task, slot: Slot | None) -> Task:
    """The task of an example: of a record, or of a person."""
    return task if slot is None else task_of_persons(task, summed=slot.join == "sum")


def rows_of(persons: Batch, shape: tuple[int, ...]) -> Batch:
    """The rows of public persons, with labels of this shape."""
    y = persons.targets["y"]
    there = y[..., 0] > 0.5
    return Batch(each(lambda t: t[there], persons.x), {"y": y[..., 1:][there].reshape(-1, *shape)})


def check_labels(task: Task, data: FederatedData) -> None:
    """Refuse labels that the task cannot learn from, and say what else there is."""
    own = (part for client in data.clients for part in (client.train, client.validation, client.test))
    for arrays in (*own, data.test, data.proxy if data.proxy_classes == data.classes else data.test):
        if len(arrays):
            rows = arrays if data.slot is None else present_rows(arrays, row_label_shape(task, data))
            _check_labels(task, rows)
    if task.labels is Labels.TOKENS and tokens_of(row_inputs(data)) is None:
        raise UserError("next-token needs records of tokens: whole numbers, one for each position")
    weights = task.options.get("weights")
    wanted = width_of(task, data)
    if weights is not None and wanted is not None and len(weights) != wanted:
        raise UserError(f"the task has {len(weights)} weights and the labels are {wanted}: give one for each")


def _check_labels(task: Task, arrays: Arrays) -> None:
    y = arrays.y
    if task.labels is Labels.CLASSES and not arrays.has_classes:
        if y.ndim > 1:
            raise UserError(
                f"each record has {'×'.join(map(str, y.shape[1:]))} labels, and classification takes one class: "
                'set task = "multi-label" (zeros and ones), "regression" (numbers) or "next-token"'
            )
        raise UserError(
            'labels must be whole numbers 0, 1, …: encode the classes as integers, or set task = "regression"'
        )
    if task.labels is Labels.BITS and (y.ndim != 2 or not np.isin(y, (0, 1)).all()):
        raise UserError(
            "multi-label needs labels of shape (records, labels) that are 0 or 1, got shape "
            f"{y.shape} with values from {y.min():g} to {y.max():g}"
        )
    if task.labels is Labels.NUMBERS and y.ndim > 2:
        raise UserError(f"a regression takes one number or one row of numbers a record, got shape {y.shape}")
    if task.labels is Labels.TOKENS and (y.ndim != 2 or y.dtype.kind != "i"):
        raise UserError(
            "next-token takes tokens as labels, one for each position: leave the labels out, and the records' own "
            "tokens are taken"
        )


def tokens_of(inputs: Fields) -> Field | None:
    """The tensor of a record that holds its tokens: its only one of whole numbers, or `input_ids`."""
    found = {name: field for name, field in leaves(inputs) if field.kind == "int" and len(field.shape) == 1}
    return found.get("input_ids") or next(iter(found.values()), None)


def label_shape(data: FederatedData) -> tuple[int, ...]:
    """Of one example, a record or a person."""
    return tuple(int(n) for n in data.clients[0].train.y.shape[1:])


def row_label_shape(task: Task, data: FederatedData) -> tuple[int, ...]:
    """Of one record; of a person's, the first number beside its label says that it is there."""
    shape = label_shape(data)
    return shape if data.slot is None else row_label(task, shape[-1])


def row_inputs(data: FederatedData) -> Fields:
    """What is public of one record, whether or not it is one of a person's."""
    return data.inputs if data.slot is None else data.slot.of_a_row(data.inputs)


def row_shape(data: FederatedData) -> tuple[int, ...]:
    """Of one record that is one array."""
    shape: tuple[int, ...] = data.input_shape
    return shape if data.slot is None else shape[1:]


def width_of(task: Task, data: FederatedData) -> int | None:
    """How many outputs a model needs; None where only the model knows."""
    tokens = tokens_of(row_inputs(data)) if task.labels is Labels.TOKENS else None
    return task.width(data.classes, row_label_shape(task, data), None if tokens is None else tokens.values)


def inputs_of(data: FederatedData, model: object) -> Fields:
    """What the model is given: a model of the catalogue takes numbers, whole ones as floats."""
    inputs = row_inputs(data)
    if not is_shipped(model):
        return inputs
    if isinstance(inputs, Mapping):
        names = ", ".join(name for name, _ in leaves(inputs))
        raise UserError(
            f"model {model!r} takes one array of numbers, and these records have {names}: give a model of your own"
        )
    return Field(inputs.shape)


def stand_in_records(task: Task, inputs: Fields, slot: Slot | None = None) -> Arrays:
    """Two blank records or persons for a server, which has none: public shapes, labels as the task has them."""
    if slot is not None:
        rows = stand_in_records(task, slot.of_a_row(inputs))
        return grouped(rows, np.arange(2), slot)
    tokens = tokens_of(inputs)
    shape: tuple[int, ...] = (task.outputs or 1,) if task.labels is Labels.BITS else ()
    if task.labels is Labels.NUMBERS and (task.outputs or 1) > 1:
        shape = (task.outputs or 1,)
    if task.labels is Labels.TOKENS and tokens is not None:
        shape = tokens.shape
    whole = task.labels in (Labels.CLASSES, Labels.TOKENS)
    y = np.zeros((2, *shape), np.int64 if whole else np.float32)
    y[1] = 1
    return Arrays(each(lambda field: field.blank(2).numpy(), inputs), y)


def made_up_rows(task: Task, data: FederatedData, model: object, rows: int = MADE_UP, seed: int = 0) -> Batch:
    """Synthetic records and labels within public shapes and ranges."""
    drawn, slot = torch.Generator().manual_seed(seed), data.slot
    inputs = inputs_of(data, model)
    if slot is None:
        x = each(lambda field: field.sample(rows, drawn), inputs)
    else:
        x = each(lambda field: field.sample(rows * slot.rows, drawn).unflatten(0, (rows, slot.rows)), inputs)
    made = learned_by(task, data.slot).made_up(rows, label_shape(data), width_of(task, data), drawn)
    return Batch(x, {"y": made})
