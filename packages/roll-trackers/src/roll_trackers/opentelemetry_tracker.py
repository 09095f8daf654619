"""Tracker `opentelemetry`: spans of the run, its steps, its stages, and the calls of workers in them.

run ─┬─ build roles ── actor_train.start
     ├─ step ─┬─ rollout ─┬─ actor_infer.result
     │        │           └─ reward ── rewards.math.score
     │        └─ train ── actor_train.update
     └─ checkpoint ── actor_train.save
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from roll_core.spec.pipeline import TraceContext, WorkerSpans
from roll_trackers.config import OpenTelemetryOptions
from roll_trackers.remote_run import RemoteTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span, TracerProvider

_RUN = "roll-run"
"""Key of a context in which a stage of a run is open."""
_FLUSH_MS = 10_000
"""Longest time in milliseconds that the end of a run waits for the collector."""
_WORKER_FLUSH_MS = 3_000
"""The same for the end of a worker."""


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

        valid = OpenTelemetryOptions(**options)
        self._export = Export(valid, self.run_dir / "spans.jsonl", "w")
        self._tracer = self._export.provider.get_tracer("roll")
        self._worker_options = options | {"run_dir": str(self.run_dir)}
        links = []
        if run_id is not None:
            trace_id, _, span_id = run_id.partition("-")
            earlier = trace.SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True)
            links.append(trace.Link(earlier))
        self._run = self._tracer.start_span("run", attributes={"roll.run": run_name}, links=links)
        context = self._run.get_span_context()
        CallSpans.of_driver[str(self.run_dir)] = self._export.provider
        return f"{trace.format_trace_id(context.trace_id)}-{trace.format_span_id(context.span_id)}"

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[TraceContext]:
        """Span of a stage, within the stage that is current in this task, or within the run."""
        from opentelemetry import context, trace

        before = context.get_current()
        outer = before
        if context.get_value(_RUN, before) is not self._run or not trace.get_current_span(before).is_recording():
            outer = context.set_value(_RUN, self._run, trace.set_span_in_context(self._run, before))
        span = self._tracer.start_span(name, context=outer, record_exception=False, set_status_on_exception=False)
        ids = span.get_span_context()
        with _current(span, outer, before):
            yield TraceContext(
                parent=f"00-{trace.format_trace_id(ids.trace_id)}-{trace.format_span_id(ids.span_id)}-01",
                target=f"{__name__}:{CallSpans.__name__}",
                options=self._worker_options,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the number of the step on its span."""
        from opentelemetry import trace

        trace.get_current_span().set_attribute("roll.step", step)

    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """End the span of the run and send what is left."""
        from opentelemetry import trace

        self._run.set_status(trace.StatusCode.ERROR if failed else trace.StatusCode.OK)
        self._run.end()
        del CallSpans.of_driver[str(self.run_dir)]
        self._export.close(_FLUSH_MS)


class CallSpans(WorkerSpans):
    """Spans of a worker's calls. A worker in the driver's process uses the driver's exporter.

    Another process exports its spans itself, with the same options; to a file beside the driver's.
    """

    of_driver: ClassVar[dict[str, TracerProvider]] = {}
    """Providers of the runs whose driver is this process, by run directory."""

    def __init__(self, role: str, rank: int, options: Mapping[str, Any]) -> None:
        self._attributes = {"roll.role": role, "roll.rank": rank}
        run_dir = Path(options["run_dir"])
        valid = OpenTelemetryOptions(**{name: value for name, value in options.items() if name != "run_dir"})
        self._export: Export | None = None
        provider = self.of_driver.get(str(run_dir))
        if provider is None:
            self._export = Export(valid, run_dir / f"spans-{role}-{rank}.jsonl", "a")
            provider = self._export.provider
        self._tracer = provider.get_tracer("roll")

    @contextlib.contextmanager
    def call(self, name: str, parent: str) -> Iterator[None]:
        """See `WorkerSpans.call`. Spans of other libraries in the worker become children of the call."""
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        before = context.get_current()
        outer = TraceContextTextMapPropagator().extract({"traceparent": parent}, before)
        span = self._tracer.start_span(
            name, outer, attributes=self._attributes, record_exception=False, set_status_on_exception=False
        )
        with _current(span, outer, before):
            yield

    def close(self) -> None:
        """See `WorkerSpans.close`."""
        if self._export is not None:
            self._export.close(_WORKER_FLUSH_MS)


class Export:
    """Provider of a process and its exporter."""

    def __init__(self, valid: OpenTelemetryOptions, file: Path, mode: str) -> None:
        """`file` and `mode` are those of the exporter `file`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._file: IO[str] | None = None
        if valid.exporter == "file":
            self._file = file.open(mode, encoding="utf-8")
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": valid.service_name}), shutdown_on_exit=False
        )
        self.provider.add_span_processor(BatchSpanProcessor(exporter(valid, self._file)))

    def close(self, flush_ms: int) -> None:
        """Send what is left, for at most `flush_ms` milliseconds."""
        self.provider.force_flush(flush_ms)
        self.provider.shutdown()
        if self._file is not None:
            self._file.close()


def exporter(valid: OpenTelemetryOptions, file: IO[str] | None) -> Any:
    """The exporter of the SDK that the options select."""
    if file is not None:
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger(OTLPSpanExporter.__module__).addFilter(_named)
    return OTLPSpanExporter(endpoint=valid.endpoint, timeout=_FLUSH_MS / 1000)


@contextlib.contextmanager
def _current(span: Span, outer: Context, before: Context) -> Iterator[None]:
    """Make the span current and end it, with the type of an exception; `before` is the context afterwards."""
    from opentelemetry import context, trace

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
