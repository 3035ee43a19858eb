"""Exit codes of ``tide``, and the one that a job's end maps to."""

from collections.abc import Mapping
from typing import Any, Final

FAILED: Final = 1
"""A job that failed without an exit code of its own, or a check that found something."""
USAGE: Final = 2
REFUSED: Final = 65
"""The server said no: the request is wrong, the job is unknown or cannot be changed any more."""
LOST_CONTACT: Final = 69
"""Nobody answered for long enough. Jobs go on."""
PLATFORM: Final = 70
"""The job ended by no doing of its own, and without an exit code."""
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130
CANCELLED: Final = 143

TEXT: Final = """\
\b
Exit codes:
  0    done; of a job: it succeeded
  1    the job failed without a code of its own (its run-time limit, say), or a check of `tide doctor` failed
  2    wrong usage of the command line or of a manifest
  65   the server refused: invalid request, unknown job, too late
  69   lost contact with the server; jobs go on without it
  70   the platform gave up on the job, which has no code of its own
  124  --timeout is over; the job goes on
  130  interrupted by Ctrl-C; nothing was cancelled
  143  the job was cancelled
`tide submit --wait`, `tide wait` and `tide logs -f` exit as the job does: every other code is its own,
128 + N if signal N ended it (137: SIGKILL, also by want of memory). `tide get JOB` says why, and whose fault it was.
"""


def of_job(job: Mapping[str, Any]) -> int:
    """The exit code for a job that has ended."""
    if job["phase"] == "Succeeded":
        return 0
    if job["phase"] == "Cancelled":
        return CANCELLED
    code = job.get("exit_code")
    if not isinstance(code, int) or code == 0:
        return PLATFORM if job.get("attributed_to") == "platform" else FAILED
    return 128 - code if code < 0 else min(code, 255)
