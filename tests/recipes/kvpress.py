"""Benchmark side for kvpress, a program that evicts KV, in its own environment and process."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcli.bench.side import TimedSample
from kvcli.errors import EngineUnreachable, KvcliError
from tests.recipes.kvpress_environment import COMMAND
from tests.recipes.kvpress_press import Press

WORKER = Path(__file__).with_name("kvpress_worker.py")


class KvPress:
    """Benchmark side for a press, greedy. The worker loads the model once; each prompt starts with an empty cache."""

    def __init__(
        self,
        name: str,
        model: Path,
        dtype: str,
        threads: int,
        python: Path,
        *,
        device: str = "cpu",
        worker: Path = WORKER,
    ) -> None:
        """`name` selects the press, see `Press.of`; `python` is from `kvpress_environment.interpreter`."""
        self.name, self.press, self.threads, self.device, self.dtype = name, Press.of(name), threads, device, dtype
        self.peak_bytes: int | None = None  # of the worker, after the last run
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            # -I: excludes PYTHONPATH and the worker's folder, which has a kvpress.py
            self._process = subprocess.Popen(
                [str(python), "-I", str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is handled here, and ends the worker
            )
        except OSError as error:
            self._errors.close()
            raise EngineUnreachable(
                f"the Python of kvpress could not be started: {error}", code="kvpress_failed", try_=[COMMAND]
            ) from error
        asked = {"model": str(model), "dtype": dtype, "threads": threads, "device": device}
        try:
            self._versions: Mapping[str, str] = self._ask(asked | self.press.asked())["ready"]
        except BaseException:
            self.close()
            raise

    @property
    def setup(self) -> dict[str, str]:
        return {
            "engine": " · ".join(f"{name} {found}" for name, found in self._versions.items()),
            "press": f"{self.press.kind}, drops {self.press.ratio:.0%} of the prompt's KV cache after prefill",
            "exactness": "approx",
            "dtype": self.dtype,
            "weights": self.dtype,
            "device": self.device,
            "threads": str(self.threads),
            "attention": "sdpa",
            "process": "separate",
        }

    def run(self, prompt: Sequence[int], new: int) -> TimedSample:
        said = self._ask({"prompt": list(prompt), "new": new})
        self.peak_bytes = said["peak_bytes"]
        return TimedSample(tuple(said["ids"]), tuple(said["at"]), len(prompt), said["kv_bytes"])

    def close(self) -> None:
        """End the worker, even in the middle of a run."""
        process = self._process
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that the worker did not read
                    stream.close()
        self._errors.close()

    def _ask(self, what: Mapping[str, object]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = process.wait()
            self._errors.seek(0)
            last = [said.strip() for said in self._errors.read().splitlines() if said.strip()][-2:]
            raise self._failed(f"its process ended with status {status}", last)
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self._failed(said["error"].splitlines()[0])
        return said

    def _failed(self, why: str, lines: Sequence[str] = ()) -> KvcliError:
        return EngineUnreachable(
            f"kvpress failed on {self.press.kind}: {why}",
            code="kvpress_failed",
            lines=lines,
            try_=[f"leave --baseline {self.name} out", "another press, as in --baseline kvpress:SnapKV"],
        )
