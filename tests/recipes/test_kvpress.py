"""kvpress as a side: the lines to its worker, the environment it needs, and the worker itself on a press of ours."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcli.bench import side_factory
from kvcli.bench.side_factory import baseline_of
from kvcli.errors import ExitStatus, KvcliError, UsageError
from tests.fakes import Machine
from tests.families import build, prompt
from tests.recipes import bench, kvpress_environment, kvpress_worker
from tests.recipes.kvpress import KvPress
from tests.recipes.kvpress_environment import COMMAND, interpreter, main, make_environment, torch_version
from tests.recipes.kvpress_press import PRESSES, Press

STAND_IN = Path(__file__).with_name("kvpress_stand_in.py")


def side(name: str = "kvpress", **more: Any) -> KvPress:
    return KvPress(name, Path("model"), "float32", 1, Path(sys.executable), worker=STAND_IN, **more)


# ---- the side, with a stand-in for the worker ----


def test_a_sample_comes_back_whole():
    pressed = side("kvpress:SnapKV:0.25")
    sample = pressed.run([3, 5], 3)
    assert (sample.ids, sample.at, sample.prompt, sample.kv_bytes) == ((6, 7, 8), (0.5, 1.0, 1.5), 2, 96)
    assert pressed.run([5, 11], 1).ids == (12,)
    assert pressed.peak_bytes == 4096
    assert pressed.setup["engine"] == "kvpress 0"
    assert pressed.setup["press"].startswith("SnapKVPress, drops 25% ")
    assert pressed.name == "kvpress:SnapKV:0.25"
    pressed.close()


def test_what_the_worker_refuses_is_said_in_one_line():
    with pytest.raises(KvcliError, match=r"kvpress failed on TOVAPress: ValueError: no such press\n") as caught:
        side("kvpress:TOVA")
    assert (caught.value.code, caught.value.exit) == ("kvpress_failed", ExitStatus.ENGINE_UNREACHABLE)
    assert caught.value.try_


def test_an_answer_that_is_an_error_leaves_the_worker_running():
    pressed = side()
    with pytest.raises(KvcliError, match="too short"):
        pressed.run([7], 2)
    assert pressed.run([1], 1).ids == (2,)
    pressed.close()


def test_a_worker_that_dies_is_an_error_with_its_last_words():
    pressed = side()
    with pytest.raises(KvcliError, match="ended with status 9") as caught:
        pressed.run([13], 2)
    assert caught.value.lines == ("out of memory, says the system",)
    with pytest.raises(KvcliError, match="ended with status 9"):  # and again, with nobody at the other end
        pressed.run([1], 2)
    pressed.close()


def test_closing_ends_the_process():
    pressed = side()
    process = pressed._process
    assert process.poll() is None
    pressed.close()
    assert process.poll() is not None


def test_an_interpreter_that_is_gone_is_an_error(tmp_path: Path):
    with pytest.raises(KvcliError, match="could not be started"):
        KvPress("kvpress", Path("model"), "float32", 1, tmp_path / "python")


# ---- which press ----


@pytest.mark.parametrize(
    ("name", "kind", "ratio"),
    [
        ("kvpress", "StreamingLLMPress", 0.5),
        ("kvpress:SnapKV", "SnapKVPress", 0.5),
        ("kvpress:snapkvpress:0.75", "SnapKVPress", 0.75),
        ("kvpress::.25", "StreamingLLMPress", 0.25),
    ],
)
def test_a_press_is_named_with_or_without_its_ratio(name: str, kind: str, ratio: float):
    assert Press.of(name) == Press(kind, ratio)


@pytest.mark.parametrize("ratio", ["0", "1", "1.5", "-0.5", "half", "nan", ""])
def test_a_ratio_lies_between_nothing_and_all(ratio: str):
    with pytest.raises(UsageError, match="share of the prompt") as caught:
        Press.of(f"kvpress:SnapKV:{ratio}")
    assert caught.value.try_ == ("--baseline kvpress:SnapKV:0.5",)


def test_an_unknown_press_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="no press 'SnapK'") as caught:
        Press.of("kvpress:SnapK:0.5")
    assert all(press in caught.value.lines[0] for press in PRESSES)
    assert caught.value.try_ == ("--baseline kvpress:SnapKV",)


@pytest.fixture
def _baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baselines of a checkout, as `python tests/recipes/bench.py` has them."""
    for name, baseline in bench.BASELINES.items():
        monkeypatch.setitem(side_factory.BASELINES, name, baseline)


@pytest.mark.usefixtures("_baselines")
@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--baseline", "kvpress:SnapK"], "usage"),
        (["--baseline", "kvpress:SnapKV"], "missing_extra"),
        (["--set", "sample.temperature=0.8", "--baseline", "kvpress"], "usage"),
    ],
)
def test_the_command_of_a_checkout_refuses_with_a_code(tmp_path: Path, args: list[str], code: str):
    result = Machine(tmp_path)("bench", "demo", "--json", *args)
    assert (result.exit, json.loads(result.out)["code"]) == (ExitStatus.USAGE, code)


def test_an_installation_has_no_kvpress():
    assert side_factory.baseline_of("kvpress") is None


@pytest.mark.usefixtures("_baselines")
def test_only_kvpress_takes_a_choice_behind_a_colon():
    assert [baseline_of(name) for name in ("kvpress:TOVA:0.3", "hf", "hf:TOVA", "kvpres")] == [
        "kvpress", "hf", None, None
    ]  # fmt: skip


# ---- its environment ----


def test_without_the_environment_the_one_command_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="a separate Python environment") as caught:
        interpreter(tmp_path)
    assert caught.value.try_ == (COMMAND,)
    assert torch_version() in " ".join(caught.value.lines)


def test_the_command_installs_kvclis_own_torch_before_kvpress(tmp_path: Path):
    ran, said = list[list[str]](), list[str]()

    def run(command: Sequence[str]) -> str:
        ran.append(list(command))
        if "venv" in command:
            Path(command[-1]).mkdir()
        return "0.5 5.2"

    python = make_environment(tmp_path, said.append, run=run)
    assert ran[0] == [sys.executable, "-m", "venv", str(tmp_path / "kvpress")]
    assert [command[-1] for command in ran[1:3]] == [f"torch=={torch_version()}", "kvpress"]
    assert "+" not in ran[1][-1]
    assert all(command[0] == str(python) for command in ran[1:])
    assert interpreter(tmp_path) == python
    assert said


def test_an_environment_that_was_broken_off_does_not_count_and_is_made_anew(tmp_path: Path):
    def fail(command: Sequence[str]) -> str:
        Path(tmp_path / "kvpress").mkdir(exist_ok=True)
        (tmp_path / "kvpress" / "left-over").touch()
        if "venv" in command:
            return ""
        raise KvcliError("no network")

    def run(command: Sequence[str]) -> str:
        (tmp_path / "kvpress").mkdir(exist_ok=True)
        return ""

    with pytest.raises(KvcliError, match="no network"):
        make_environment(tmp_path, lambda _: None, run=fail)
    with pytest.raises(UsageError):
        interpreter(tmp_path)
    make_environment(tmp_path, lambda _: None, run=run)
    assert not (tmp_path / "kvpress" / "left-over").exists()
    interpreter(tmp_path)


def test_a_failing_install_ends_in_pips_last_words(monkeypatch: pytest.MonkeyPatch):
    code = "import sys; print('looking'); sys.exit('ERROR: no matching distribution')"
    with pytest.raises(KvcliError, match="could not be created") as caught:
        kvpress_environment._run([sys.executable, "-c", code])
    assert caught.value.lines[-1] == "ERROR: no matching distribution"
    assert (caught.value.code, caught.value.exit) == ("no_environment", ExitStatus.USAGE)
    assert "--torch VERSION" in caught.value.try_[0]


def test_the_command_prints_errors_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(command: Sequence[str]) -> str:
        raise KvcliError("no luck", lines=["why"], try_=["this"])

    monkeypatch.setenv("KVCLI_HOME", str(tmp_path))
    monkeypatch.setattr(kvpress_environment, "_run", run)
    assert main(["--torch", "2.9.1"]) == 1
    assert capsys.readouterr().err.splitlines()[-3:] == ["error: no luck", "  why", "  try:  this"]


# ---- the worker ----


class KeepAll:
    """A press that compresses nothing."""

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        yield


class KeepLast:
    """A press that keeps the last slots of every layer, once the prompt is read."""

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        def cut(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            cache = kwargs["past_key_values"] if "past_key_values" in kwargs else kwargs["cache"]  # its name changed
            layer = cache.layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, -5:], layer.values[:, :, -5:]

        hooks = [layer.self_attn.register_forward_hook(cut, with_kwargs=True) for layer in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_worker_writes_what_the_model_writes():
    model, ids = build("llama"), prompt(31)
    text = list(ids)
    with torch.inference_mode():
        for _ in range(12):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    said = kvpress_worker.run(model, KeepAll(), ids, 12)
    assert said["ids"] == text[31:]
    assert said["at"] == sorted(said["at"])
    assert said["kv_bytes"] == 3 * 2 * 2 * 16 * 4 * (31 + 11)


def test_the_worker_counts_positions_on_after_a_press():
    """A wrong position would rotate the new keys as if the dropped tokens had never been."""
    model, ids = build("llama"), prompt(31)
    said = kvpress_worker.run(model, KeepLast(), ids, 6)
    assert said["kv_bytes"] == 3 * 2 * 2 * 16 * 4 * (5 + 5)
    first = said["ids"][0]
    with torch.inference_mode():  # the second token, with a mask in place of the press
        full = model(torch.tensor([ids]), use_cache=True)
        cache = full.past_key_values
        mask = torch.zeros(1, 32)
        mask[:, -6:] = 1
        place = torch.tensor([[31]])
        again = model(torch.tensor([[first]]), past_key_values=cache, position_ids=place, attention_mask=mask)
    assert said["ids"][1] == int(again.logits[0, -1].argmax())


def test_the_worker_answers_errors_and_goes_on():
    lines = [{"press": "A"}, {"press": "B"}, {"prompt": "no ids", "new": 1}, {"prompt": prompt(7), "new": 2}]
    model, out = build("llama"), io.StringIO()

    def load(asked: dict[str, Any]) -> tuple[Any, Any]:
        if asked["press"] == "A":
            raise ValueError("no such press")
        return model, KeepAll()

    ready = pytest.MonkeyPatch()
    ready.setattr(kvpress_worker, "ready", lambda: {"ready": {}})
    kvpress_worker.serve(io.StringIO("\n".join(map(json.dumps, lines))), out, load)
    ready.undo()
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert said[0] == {"error": "ValueError: no such press"}
    assert said[1] == {"ready": {}}
    assert "error" in said[2]
    assert len(said[3]["ids"]) == 2


def test_an_unknown_press_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kvpress_worker, "import_module", lambda _: SimpleNamespace())
    monkeypatch.setattr(kvpress_worker, "version", lambda _: "0.5")
    with pytest.raises(ValueError, match=r"kvpress 0\.5 has no NopePress"):
        kvpress_worker.load({"press": "NopePress"})
