"""Tracker `opentelemetry`: spans of the run, its steps and its stages.

run ─┬─ step ─┬─ rollout ── reward
     │        └─ train
     └─ checkpoint
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from roll_trackers.config import OpenTelemetryOptions
from roll_trackers.remote_run import RemoteTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_RUN = "roll-run"
"""Key of a context in which a stage of a run is open."""
_FLUSH_MS = 10_000
"""Longest time in milliseconds that the end of a run waits for the collector."""


def _named(record: logging.LogRecord) -> bool:
    """Name the tracker in a message of the exporter, which only names spans."""
    if not str(record.msg).startswith("tracker "):
        record.msg = f"tracker opentelemetry: {record.msg}"
    return True


class OpenTelemetryTracker(RemoteTracker):
    """One trace per run. The trace of a resumed run has a link to the one that it continues.

    Spans of other libraries in the driver become children of the stage in which they begin. A span has the type of an
    error, not its message, which may contain a secret.
    """

    name = "opentelemetry"

    def open(self, run_name: str, options: dict[str, Any], run_id: str | None) -> str:
        """Begin the span of the run. `run_id` is the trace and the span of the run that this one resumes."""
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        valid = OpenTelemetryOptions(**options)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": valid.service_name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter(valid)))
        self._tracer = self._provider.get_tracer("roll")
        links = []
        if run_id is not None:
            trace_id, _, span_id = run_id.partition("-")
            earlier = trace.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True)
            links.append(trace.Link(earlier))
        self._run = self._tracer.start_span("run", attributes={"roll.run": run_name}, links=links)
        context = self._run.get_span_context()
        return f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"

    def _exporter(self, valid: OpenTelemetryOptions) -> Any:
        if valid.exporter == "file":
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            self._file = (self.run_dir / "spans.jsonl").open("w", encoding="utf-8")
            return ConsoleSpanExporter(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_named)
        return OTLPSpanExporter(endpoint=valid.endpoint, timeout=_FLUSH_MS / 1000)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Span of a stage, within the stage that is current in this task, or within the run."""
        from opentelemetry import context, trace

        before = context.get_current()
        outer = before
        if context.get_value(_RUN, before) is not self._run or not trace.get_current_span(before).is_recording():
            outer = context.set_value(_RUN, self._run, trace.set_span_in_context(self._run, before))
        span = self._tracer.start_span(name, context=outer, record_exception=False, set_status_on_exception=False)
        context.attach(trace.set_span_in_context(span, outer))
        try:
            yield
        except BaseException as error:
            span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            # Not `detach`: a task may end a stage in another context than the one in which it began.
            context.attach(before)
            span.end()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the number of the step on its span."""
        from opentelemetry import trace

        trace.get_current_span().set_attribute("roll.step", step)

    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """End the span of the run and send what is left."""
        from opentelemetry import trace

        self._run.set_status(trace.StatusCode.ERROR if failed else trace.StatusCode.OK)
        self._run.end()
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()
        if hasattr(self, "_file"):
            self._file.close()
