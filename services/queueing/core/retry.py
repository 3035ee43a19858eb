"""What a failure leads to: another attempt at once, one after a pause, or none. Pure functions of the counts."""

from schemas.events.job import RestartPolicy
from schemas.events.worker import GroupEnded
from schemas.vocabulary import EndCause, RestartPolicyKind
from services.queueing.core.values import Rules, Workload

_DOUBLINGS_MAX = 40


def may_retry(policy: RestartPolicy, *, failures: int, exit_code: int | None) -> bool:
    """Whether a job that has failed ``failures`` times, the last time with ``exit_code``, is tried again.

    An exit code that nobody saw (None) is in no list of codes.
    """
    if policy.kind is RestartPolicyKind.NEVER:
        return False
    if policy.kind is RestartPolicyKind.EXIT_CODES and exit_code not in policy.exit_codes:
        return False
    return failures <= policy.limit


def is_exhausted(policy: RestartPolicy, *, failures: int) -> bool:
    """Whether ``failures`` of the job are more than its policy bears, whatever their exit codes were."""
    return failures > (0 if policy.kind is RestartPolicyKind.NEVER else policy.limit)


def got_further(workload: Workload, data: GroupEnded, *, now: float, rules: Rules) -> bool:
    """Whether the attempt that has ended took the job one step further than any before it.

    Where nobody counts steps (restart and fixed mode), running for ``steady_seconds`` is getting further; being stuck
    is not. ``now``: seconds of this process's monotonic clock.
    """
    if data.step is not None:
        return data.step > workload.best_step
    return data.cause is not EndCause.STUCK and was_steady(workload, now=now, rules=rules)


def was_steady(workload: Workload, *, now: float, rules: Rules) -> bool:
    """Whether the group of the present attempt has run for long."""
    has_started = workload.started_attempt == workload.attempt and workload.started_at is not None
    return has_started and now - (workload.started_at or 0.0) >= rules.steady_seconds


def pause_after_platform_failure(failures_in_a_row: int, rules: Rules) -> float:
    """Seconds to wait after so many failures of the platform in a row: none after the first, then doubling."""
    return pause_after_start_failure(failures_in_a_row - 1, rules) if failures_in_a_row > 1 else 0.0


def pause_after_start_failure(failures_in_a_row: int, rules: Rules) -> float:
    """Seconds to wait when members could not be started; doubles each time in a row, up to the limit."""
    doublings = min(max(failures_in_a_row, 1) - 1, _DOUBLINGS_MAX)
    return float(min(rules.back_off_first_seconds * 2**doublings, rules.back_off_limit_seconds))
