"""A world of strings and a model that obeys, for commands run in this process."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcli.cli import run
from kvcli.demo import weights_dir
from kvcli.environment import Environment, Paths
from kvcli.fit import memory
from tests.fake_model import FakeModel


class Stream(io.TextIOWrapper):
    """A text stream over bytes in memory, a terminal or not."""

    def __init__(self, data: bytes = b"", *, is_tty: bool = False, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO(data)
        self._is_tty = is_tty
        super().__init__(self.bytes, encoding=encoding, newline="\n", write_through=True)

    def isatty(self) -> bool:
        return self._is_tty

    @property
    def text(self) -> str:
        return self.bytes.getvalue().decode()


class ClosedPipe(Stream):
    """A pipe whose reader has gone after so many writes."""

    def __init__(self, writes: int = 0) -> None:
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


class Loaded(FakeModel):
    """The fake model as `load` would return it."""

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class Result:
    """How one command line ended."""

    exit: int
    out: str
    err: str
    world: Environment


@dataclass
class Machine:
    """Runs command lines in one folder, as one user, with one model."""

    folder: Path
    model: Loaded = field(default_factory=lambda: Loaded(answer="It is 972 metres."))
    environ: dict[str, str] = field(default_factory=dict)
    has_config: bool = False  # of its own

    def load(self, profile: Any, tell: object = None) -> Loaded:
        """Stands in for `Setup.load`."""
        self.model.profile = profile
        return self.model

    def __post_init__(self) -> None:
        """A user who named a model, so that nobody is asked for one."""
        if self.has_config:
            return
        config = self.folder / "home" / "config" / "config.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(f'default_model = "{weights_dir()}"\n')

    def world(self, stdin: bytes = b"", tty: tuple[str, ...] = (), stdout: Stream | None = None) -> Environment:
        streams = {name: Stream(is_tty=name in tty) for name in ("stdout", "stderr")}
        environ = {"KVCLI_HOME": str(self.folder / "home"), "HOME": str(self.folder), **self.environ}
        paths = Paths.of(environ)
        if not self.has_config:
            kept = paths.cache / "calibration" / f"program-{memory.build()}"  # measuring it takes seconds
            with suppress(OSError):  # where a test made the cache unusable
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(str(memory.BASE))
        return Environment(
            stdin=Stream(stdin, is_tty="stdin" in tty),
            stdout=stdout or streams["stdout"],
            stderr=streams["stderr"],
            environ=environ,
            cwd=self.folder,
            paths=paths,
        )

    def __call__(
        self, *args: str, stdin: bytes = b"", tty: tuple[str, ...] = (), stdout: Stream | None = None
    ) -> Result:
        world = self.world(stdin, tty, stdout)
        status = run(args, world)
        out, err = (outlet.stream for outlet in (world.stdout, world.stderr))
        assert isinstance(out, Stream)
        assert isinstance(err, Stream)
        return Result(status, out.text, err.text, world)
