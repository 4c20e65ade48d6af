"""Run one calibration and save it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.fit.calibration import digest, folder_of, machine_fingerprint, save_calibration
from kvcli.models.hashes import Hashes, Stamped, releases
from kvcli.schemas.fit import CalibrationDocument, ModelTimes
from kvcli.version import __version__

if TYPE_CHECKING:
    import torch

    from kvcli.chat.model import Model
    from kvcli.environment import Environment
    from kvcli.fit.plan import Plan, PlannedModel
    from kvcli.settings.profile import Profile

Tell = Callable[[str], None]


def calibrate(model: Model, cache: Path, tell: Tell = lambda _: None) -> CalibrationDocument:
    """Measure the machine that `model` runs on, and the model's pass times."""
    import torch

    from kvcli.calibrate import machine as measured
    from kvcli.models import machine

    at = model.lm.device
    name = _name(at)
    folder_of(cache)
    tell("measuring memory bandwidth and matrix products")
    found = CalibrationDocument(
        kvcli=__version__,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        fingerprint=machine_fingerprint(name),
        cpu=machine.cpu_name(),
        device=name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        bandwidth=measured.bandwidth(at),
        gemm={kind: measured.gemm(at, getattr(torch, kind)) for kind in ("bfloat16", "float32")},
        launch=measured.launch(at),
        links=measured.links(at),
        disk=measured.disk(_weights_file(model)),
        model=_times(model, tell),
    )
    save_calibration(cache, found.model_copy(update={"model": None}))
    save_calibration(cache, found)
    return found


def run_calibration(
    world: Environment, load: Callable[[Profile], Model], profile: Profile, tell: Tell = lambda _: None
) -> CalibrationDocument:
    """Run `kvcli bench --calibrate`: load the model with `load` (of a setup), measure, save in the cache folder."""
    with load(profile) as model:
        return calibrate(model, world.paths.cache, tell=tell)


def model_fingerprint(dtype: str, quant: str, layers: int, hidden: int, vocab: int, name: str, weights: str) -> str:
    """Return a digest of what pass times depend on beside the machine; `weights`: the hash of the weight files."""
    return digest(name, dtype, quant, layers, hidden, vocab, weights, *releases().values())


def fingerprint_in(plan: Plan, subject: PlannedModel, name: str, cache: Path) -> str:
    """Return the fingerprint of a model as it would be loaded. A file that was never hashed was never timed either."""
    from kvcli.fit.plan import torch_dtype

    shape, dtype = subject.shape, torch_dtype(subject, plan.profile)
    weights = Hashes(cache).known([Stamped.of(Path(file)) for file in subject.weights])
    return model_fingerprint(dtype, plan.profile.load.quant, shape.layers, shape.hidden, shape.vocab, name, weights)


def fingerprint_of(model: Model) -> str:
    """Return the fingerprint of a loaded model."""
    info, hidden, lm = model.info, int(model.lm.model.config.get_text_config().hidden_size), model.lm
    weights = lm.hashes.of(lm.files["weights"]) if lm.files else ""
    return model_fingerprint(info.dtype, info.quant, info.layers, hidden, info.vocab, info.id, weights)


def _times(model: Model, tell: Tell) -> ModelTimes:
    from kvcli.calibrate.passes import pass_times

    passes = pass_times(model.lm, tell)
    return ModelTimes.from_attributes(model.info, fingerprint=fingerprint_of(model), passes=passes)


def _weights_file(model: Model) -> Path:
    return max(Path(model.info.path).glob("*.safetensors"), key=lambda f: f.stat().st_size, default=Path())


def _name(device: torch.device) -> str:
    return f"cuda:{device.index or 0}" if device.type == "cuda" else device.type
