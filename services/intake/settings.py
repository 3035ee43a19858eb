"""Settings of intake: section ``[intake]``, environment ``TIDE_INTAKE_*``."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from schemas.resources import NVIDIA_GPU, SLOT
from shared.settings import Positive, ServiceSettings


class IntakeSettings(ServiceSettings):
    """Limits of the door. Durations in seconds."""

    SECTION: ClassVar[str] = "intake"

    port: Annotated[int, Field(ge=0, le=65_535)] = 8470
    """The public port of the installation."""
    accelerator_resource: Literal["tidewright.io/slot", "nvidia.com/gpu"] = SLOT
    """What an accelerator counts in before the first capacity report says so."""
    adapter: Literal["local", "kubernetes"] = "local"
    """Where workers run: decides which fields are named in a warning as having no meaning."""
    unwritten_jobs_max: Annotated[int, Field(ge=1)] = 5_000
    """Submissions accepted for writing and not yet committed; above it: 429."""
    bulk_jobs_max: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    """Jobs in one list."""
    bulk_bytes_max: Annotated[int, Field(ge=1_024)] = 8 * 1_048_576
    """A list of jobs; each job alone is bound by ``body_bytes_max``."""
    submission_batch_max: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    """Submissions in one transaction."""
    submission_seconds_max: Positive = 30.0
    """A submission that is not committed by then is answered with 503."""
    idempotency_seconds: Positive = 86_400.0
    """So long an Idempotency-Key is remembered."""
    expiry_interval_seconds: Positive = 300.0
    """How often expired keys are deleted."""
    census_interval_seconds: Positive = 5.0
    """How often open jobs are counted by phase, for the instruments."""
    document_nodes_max: Annotated[int, Field(ge=100)] = 20_000
    """Values in one YAML or JSON body, aliases counted as often as they are used."""
    document_depth_max: Annotated[int, Field(ge=4, le=200)] = 32
    page_jobs_max: Annotated[int, Field(ge=1, le=5_000)] = 500
    """Longest page of jobs or history that may be asked for."""
    capacity_cache_seconds: Positive = 1.0
    """Age up to which the capacity report is used without looking again."""
    capacity_silence_seconds: Positive = 90.0
    """Execution reports every 30 s; after so long ``why`` says that it is silent."""
    stream_heartbeat_seconds: Positive = 15.0
    stream_poll_seconds: Positive = 0.1
    """Longest wait between two looks at the log while somebody is subscribed; a wake-up shortens it."""
    stream_page_events_max: Annotated[int, Field(ge=1, le=10_000)] = 500
    """Events that are read for one subscriber at a time."""
    stream_buffer_events_max: Annotated[int, Field(ge=1)] = 10_000
    """Latest events kept in memory for all subscribers; who is further behind reads them from the log."""
    stream_send_seconds: Positive = 30.0
    """A subscriber that has taken nothing for so long is cut off; it resumes with Last-Event-ID."""
    streams_max: Annotated[int, Field(ge=1)] = 1_000
    """Open event streams; above it: 429."""
    proxy_connect_seconds: Positive = 2.0
    proxy_answer_seconds: Positive = 60.0
    """The owner of logs and curves may be silent for so long."""


assert {SLOT, NVIDIA_GPU} == {"tidewright.io/slot", "nvidia.com/gpu"}, "the literals above are these names"
