"""What a benchmark has found so far, kept on disk: a run that was cut off goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Outcome = dict[str, Any]  # of kv_quality: right [4], kept, bytes, and t where T was found


class Known:
    """Outcomes so far, a line each on disk."""

    def __init__(self, path: Path) -> None:
        self.path, self._found = path, dict[str, Outcome]()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                key, outcome = json.loads(line)
            except ValueError:  # cut off while it was written
                continue
            self._found[key] = outcome

    def of(self, key: str, make: Callable[[], Outcome]) -> Outcome:
        if key not in self._found:
            self._found[key] = make()
            with self.path.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
        return self._found[key]
