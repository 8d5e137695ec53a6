"""Decoding in its own thread, for pods that only decode. See `decode.py` for the interface.

    decoder = DecodeLoop(engine, kv, listener, MonotonicClock(), max_batch_size=32, queue_limit=256)
    decoder.start()
    decoder.submit(DecodeJob(...)) ... decoder.filled(request_id) ... decoder.close()

The loop: 1. admit what fits, 2. tell the listener what happened, 3. run one step over the batch, 4. again; it sleeps while
there is nothing to run. When a step fails, each of its sequences is run alone, and only those that fail again end: a
step writes the KV of one position, so running it again changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flowprefill.clock import Timekeeper
from flowprefill.engines.protocol import DecodeSequence, Engine
from flowprefill.errors import EngineFailed, Unavailable
from flowprefill.execution.decode import DecodeJob, DecodeListener, DecodeState
from flowprefill.execution.decode_batch import DecodeBatch, Notice, StepFailure
from flowprefill.scheduling.kv import KVCachePool

log = logging.getLogger(__name__)

STOPPING = "the pod is stopping and takes no more answers"
CRASHED = "the decode thread stopped after an internal error; the pod must be restarted"


class _OpenGate:
    """A gate that never stops anybody."""

    __slots__ = ("index", "raised")

    def __init__(self) -> None:
        self.raised = False
        self.index = 0

    def pause(self, index: int) -> None:
        raise AssertionError("nobody asks a decode loop's step to pause")


class DecodeLoop:
    """Implements `decode.Decoder`; the only user of its engine and of `kv`."""

    def __init__(
        self,
        engine: Engine,
        kv: KVCachePool,
        listener: DecodeListener,
        clock: Timekeeper,
        *,
        max_batch_size: int,
        queue_limit: int,
        block_offset: int = 0,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._clock = clock
        self._batch = DecodeBatch(
            kv, max_batch_size=max_batch_size, queue_limit=queue_limit, block_offset=block_offset
        )
        self._lock = threading.Lock()  # guards the batch and the two fields below
        self._telling = threading.RLock()  # taken before `_lock`: keeps what the listener hears in order
        self._closed_because: str | None = None
        self._crashed: BaseException | None = None
        self._wake = clock.signal()
        self._gate = _OpenGate()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the decode thread."""
        assert self._thread is None, "a decode loop is started once"
        self._thread = self._clock.start_thread(self._main, name="decode")

    def submit(self, job: DecodeJob) -> None:
        with self._change():
            if self._closed_because is not None:
                raise Unavailable(self._closed_because)
            self._batch.add(job)

    def filled(self, request_id: str) -> None:
        with self._change():
            self._batch.filled(request_id)

    def fill_failed(self, request_id: str, detail: str) -> None:
        with self._change():
            self._batch.fill_failed(request_id, detail)

    def cancel(self, request_id: str) -> None:
        with self._change():
            self._batch.cancel(request_id)

    def state(self) -> DecodeState:
        with self._lock:
            return self._batch.state()

    @property
    def crashed(self) -> BaseException | None:
        """The internal error that ended the thread, or None; every job has then ended with `error`."""
        return self._crashed

    def close(self) -> None:
        """End every job with `cancelled` and join the thread; the present step is finished first."""
        with self._lock:
            if self._closed_because is None:
                self._closed_because = STOPPING
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    # The decode thread.

    def _main(self) -> None:
        try:
            with self._engine.thread_context():
                while self._turn():
                    pass
        except BaseException as error:  # top of the thread: nobody may wait for it in vain
            log.critical("the decode thread crashed", exc_info=error)
            self._crashed = error
            with self._lock:
                self._closed_because = CRASHED
                self._batch.end_all("error", CRASHED)
            self._tell()

    def _turn(self) -> bool:
        with self._lock:
            closing = self._closed_because is not None
            if closing:
                self._batch.end_all("cancelled")
            self._batch.admit()
            sequences = self._batch.begin_step()
        self._tell()
        if closing:
            return False
        if not sequences:
            self._wake.wait()
            return True
        results = self._step(sequences)
        with self._lock:
            self._batch.end_step(results)
        return True

    def _step(self, sequences: Sequence[DecodeSequence]) -> Sequence[int | StepFailure]:
        try:
            return self._run(sequences)
        except Exception as error:  # the engine's failure is its sequences' failure, not the loop's
            log.exception("a decode step failed", extra={"num_sequences": len(sequences)})
            if len(sequences) > 1:
                return [result for sequence in sequences for result in self._step([sequence])]
            shown = f"{type(error).__name__}: {error}"
            return [StepFailure(detail=str(EngineFailed(f"the engine failed in a decode step: {shown}")))]

    def _run(self, sequences: Sequence[DecodeSequence]) -> Sequence[int]:
        plan = self._engine.plan_decode(sequences)
        return checked_tokens(self._engine.run(plan, self._gate), len(sequences))

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A change from outside. What follows from it is told at once: a job need not wait for the end of a step."""
        try:
            with self._lock:
                yield
                self._batch.admit()
            self._tell()
        finally:
            self._wake.set()

    def _tell(self) -> None:
        with self._telling:
            with self._lock:
                notices = self._batch.take_notices()
            tell(self._listener, notices)


def checked_tokens(results: Sequence[int | None], num_sequences: int) -> list[int]:
    """A step's results as tokens. Raises EngineFailed when the engine did not give one per sequence."""
    tokens = [token_id for token_id in results if token_id is not None]
    if len(results) != num_sequences or len(tokens) != num_sequences:
        raise EngineFailed(f"the engine gave {len(tokens)} tokens for {num_sequences} sequences")
    return tokens


def tell(listener: DecodeListener, notices: Sequence[Notice]) -> None:
    """Hand notices over in order; a listener's failure is its own."""
    for notice in notices:
        try:
            notice(listener)
        except Exception:
            log.exception("a decode listener failed")
