"""Quality tasks, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcli.errors import UsageError
from kvcli.quality.sample import Task
from kvcli.quality.tasks import counting, extracting, needles, rules, variables

TASKS: Mapping[str, Task] = {
    task.name: task for family in (needles, variables, counting, extracting, rules) for task in family.TASKS
}


def chosen(names: Sequence[str] | None) -> list[Task]:
    """Return the tasks of these names in the order of the table; None = all."""
    if names is None:
        return list(TASKS.values())
    unknown = [n for n in names if n not in TASKS]
    if unknown or not names:
        raise UsageError(
            f'there is no quality task "{unknown[0]}"' if unknown else "no quality task is chosen",
            code="unknown_task",
            try_=["one or more of " + ", ".join(TASKS)],
        )
    return [task for name, task in TASKS.items() if name in names]
