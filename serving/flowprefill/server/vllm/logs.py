"""Our log formats for vLLM's records, which carry fields of vLLM's own that are none of the message's."""

from __future__ import annotations

import logging

import flowprefill.logs

_OF_VLLM = ("vllm_process_name", "fileinfo")


def _tidy(record: logging.LogRecord) -> logging.LogRecord:
    """`record` with the process in one field and without vLLM's helpers."""
    copy = logging.makeLogRecord(vars(record))
    copy.__dict__["vllm_process"] = vars(record).get("vllm_process_name", record.processName)
    for name in _OF_VLLM:
        copy.__dict__.pop(name, None)
    return copy


class JsonFormatter(flowprefill.logs.JsonFormatter):
    """One JSON object a line, with the vLLM process that wrote it."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_tidy(record))


class TextFormatter(flowprefill.logs.TextFormatter):
    """Text for people, with the vLLM process that wrote it."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(_tidy(record))
