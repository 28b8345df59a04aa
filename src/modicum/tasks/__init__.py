"""What is learned: losses, outputs and metrics. Four tasks ship; `Task` makes one's own."""

from modicum.tasks.catalogue import CLASSIFICATION, DEFAULT, named, names, remembered, task_of
from modicum.tasks.metrics import NO_TOKEN
from modicum.tasks.shipped import classification, multi_label, next_token, regression
from modicum.tasks.task import Labels, Task

__all__ = [
    "CLASSIFICATION",
    "DEFAULT",
    "NO_TOKEN",
    "Labels",
    "Task",
    "classification",
    "multi_label",
    "named",
    "names",
    "next_token",
    "regression",
    "remembered",
    "task_of",
]
