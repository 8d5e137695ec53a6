"""Frames of the KV transfer connection: bounded JSON messages and bounded payload pieces.

    frame = magic "FPKV" | kind: u8 (1 message, 2 payload) | length: u32 big endian | body

A message is a JSON object with a `type`. TCP's checksum covers the bytes; the magic catches a stream that is out
of step, the length a size that does not match.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from flowprefill.engines.protocol import EngineSpec
from flowprefill.errors import KVTransferFailed

_HEADER = struct.Struct(">4sBI")
_MAGIC = b"FPKV"
_MESSAGE, _PAYLOAD = 1, 2
MAX_MESSAGE_BYTES = 2**20
PIECE_BYTES = 4 * 2**20
"""Target size of one payload piece; a single block may exceed it."""
MAX_PAYLOAD_BYTES = 2**30


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Layout(_Message):
    """What must be equal on both sides for blocks to mean the same."""

    model: str = Field(max_length=1024)
    revision: str = Field(max_length=1024)
    dtype: str = Field(max_length=64)
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def differences(self, other: Layout) -> str:
        """`field: ours / theirs` for every field that differs; empty when none does."""
        ours, theirs = self.model_dump(), other.model_dump()
        return ", ".join(f"{k}: {ours[k]!r} here, {theirs[k]!r} there" for k in ours if ours[k] != theirs[k])


class Pull(_Message):
    """Consumer: send these blocks of this request, in this order."""

    type: Literal["pull"] = "pull"
    request_id: str = Field(max_length=256)
    block_ids: list[int] = Field(max_length=2**17)
    layout: Layout


class Ack(_Message):
    """Consumer: all is in place, the blocks may go."""

    type: Literal["ack"] = "ack"
    request_id: str = Field(max_length=256)


class Abort(_Message):
    """Consumer: nobody will pull this request's blocks."""

    type: Literal["abort"] = "abort"
    request_id: str = Field(max_length=256)


class Blocks(_Message):
    """Producer: payload pieces follow, each `blocks_per_piece` blocks (the last one fewer)."""

    type: Literal["blocks"] = "blocks"
    num_blocks: int = Field(ge=0)
    blocks_per_piece: int = Field(ge=1)
    block_bytes: int = Field(ge=1)


class Refused(_Message):
    """Producer: no blocks, and why."""

    type: Literal["refused"] = "refused"
    reason: Literal["unknown_request", "layout_mismatch", "wrong_blocks", "bad_message", "engine_failed"]
    message: str


class Released(_Message):
    """Producer's answer to `ack` and `abort`. `known` tells whether the request held blocks."""

    type: Literal["released"] = "released"
    known: bool


Message = Pull | Ack | Abort | Blocks | Refused | Released
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def layout_of(spec: EngineSpec) -> Layout:
    """The layout of an engine's blocks."""
    return Layout(
        model=spec.model,
        revision=spec.revision,
        dtype=spec.dtype,
        block_size=spec.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )


async def send_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send one message frame and wait until it may leave."""
    body = message.model_dump_json().encode()
    writer.write(_HEADER.pack(_MAGIC, _MESSAGE, len(body)) + body)
    await writer.drain()


async def send_payload(writer: asyncio.StreamWriter, data: memoryview) -> None:
    """Send one payload frame."""
    writer.write(_HEADER.pack(_MAGIC, _PAYLOAD, data.nbytes))
    writer.write(data)
    await writer.drain()


async def next_message(reader: asyncio.StreamReader) -> Message | None:
    """As `read_message`; None when the other side has closed the connection between two frames."""
    try:
        return await read_message(reader)
    except asyncio.IncompleteReadError as error:
        if error.partial or error.expected != _HEADER.size:
            raise
        return None


async def read_message(reader: asyncio.StreamReader) -> Message:
    """The next frame as a message. Raises `KVTransferFailed` on anything else, `IncompleteReadError` at an end."""
    kind, length = await _read_header(reader)
    if kind != _MESSAGE or length > MAX_MESSAGE_BYTES:
        raise KVTransferFailed(
            f"a KV frame of kind {kind} and {length} bytes came; "
            f"expected is a message (kind {_MESSAGE}) of at most {MAX_MESSAGE_BYTES} bytes"
        )
    body = await reader.readexactly(length)
    try:
        return _MESSAGES.validate_json(body)
    except ValidationError as error:
        raise KVTransferFailed(f"a KV message does not have its shape: {error.errors()[0]['msg']}") from None


async def read_payload(reader: asyncio.StreamReader, expected_bytes: int) -> bytes | Refused:
    """The next frame as a payload of exactly `expected_bytes`, or the producer's word on why it stops here."""
    kind, length = await _read_header(reader)
    if kind == _MESSAGE and length <= MAX_MESSAGE_BYTES:
        try:
            return Refused.model_validate_json(await reader.readexactly(length))
        except ValidationError as error:
            raise KVTransferFailed(f"a KV message came among pieces: {error.errors()[0]['msg']}") from None
    if kind != _PAYLOAD or length != expected_bytes:
        raise KVTransferFailed(
            f"a KV frame of kind {kind} and {length} bytes came; "
            f"expected is a piece (kind {_PAYLOAD}) of {expected_bytes} bytes"
        )
    return await reader.readexactly(length)


async def _read_header(reader: asyncio.StreamReader) -> tuple[int, int]:
    magic, kind, length = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if magic != _MAGIC:
        raise KVTransferFailed(f"the KV stream is out of step: a frame begins with {magic!r}, not {_MAGIC!r}")
    return int(kind), int(length)
