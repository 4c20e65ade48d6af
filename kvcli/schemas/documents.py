"""List of the JSON documents kvcli prints, as models for writing them and for `kvcli config schema NAME`.

Bytes are integers, times seconds, text is not shortened. A value that is unknown or does not apply is null. Adding a
field keeps the number behind the name; any other change raises it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from kvcli.schemas.bench import BenchDocument, BenchHistoryDocument, BenchLine, BenchPlanDocument
from kvcli.schemas.chats import ChatsDocument
from kvcli.schemas.fit import CalibrationDocument, FitDocument, RunEntry
from kvcli.schemas.heads import HeadsDocument
from kvcli.schemas.listings import (
    CacheDocument,
    CheckDocument,
    DoctorDocument,
    ModelsDocument,
    PathsDocument,
    PlanDocument,
    ProfilesDocument,
    ServeDocument,
    ServersDocument,
    SuggestionsDocument,
)
from kvcli.schemas.pack import PackDocument
from kvcli.schemas.quality import AgreementDocument, QualityDocument
from kvcli.schemas.spec import SpecDocument, SpecTuneDocument
from kvcli.schemas.summary import ExtractDocument, SummaryDocument, SummaryPlanDocument
from kvcli.schemas.turn import ChatDocument, ErrorDocument, EventDocument, TurnDocument

DOCUMENTS: Mapping[str, Any] = {
    "turn": TurnDocument,
    "chat": ChatDocument,
    "chats": ChatsDocument,
    "pack": PackDocument,
    "error": ErrorDocument,
    "event": EventDocument,
    "models": ModelsDocument,
    "check": CheckDocument,
    "serve": ServeDocument,
    "suggestions": SuggestionsDocument,
    "profiles": ProfilesDocument,
    "doctor": DoctorDocument,
    "paths": PathsDocument,
    "servers": ServersDocument,
    "cache": CacheDocument,
    "plan": PlanDocument,
    "fit": FitDocument,
    "calibration": CalibrationDocument,
    "run": RunEntry,
    "bench": BenchDocument,
    "bench_history": BenchHistoryDocument,
    "bench_row": BenchLine,
    "bench_plan": BenchPlanDocument,
    "quality": QualityDocument,
    "agreement": AgreementDocument,
    "spec": SpecDocument,
    "spec_tune": SpecTuneDocument,
    "heads": HeadsDocument,
    "summary": SummaryDocument,
    "summary_plan": SummaryPlanDocument,
    "extract": ExtractDocument,
}


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of one of `DOCUMENTS`."""
    schema = TypeAdapter(DOCUMENTS[name]).json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
