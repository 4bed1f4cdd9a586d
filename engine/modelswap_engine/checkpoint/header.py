"""Reading a safetensors header as hostile input, without the library whose reader an attacker would aim at.

Only these files are accepted; each rule has an attack in ``tests/attacks/test_header.py``:

 H1  at least 8 bytes
 H2  the header length N (8 bytes, little endian) is 2..100 000 000 and the file holds 8+N bytes; where the first
     bytes are those of a zip, a pickle or GGUF, the error says so
 H3  the header is one UTF-8 JSON object that starts with ``{``, with a bounded number of items
 H4  no key occurs twice, at any depth
 H5  ``__metadata__``, when present, maps strings to strings
 H6  every other value has exactly ``dtype`` (string), ``shape`` and ``data_offsets`` (lists of integers, two offsets)
 H7  names are not empty, at most 1024 bytes, without control or invisible characters
 H8  the dtype is known, the shape has at most 32 dimensions and means at most 2^50 bytes, whole ones
 H9  0 <= begin <= end <= bytes of data
 H10 end - begin is what dtype and shape mean
 H11 tensors neither overlap nor leave holes
 H12 the last tensor ends where the file ends
 H13 at most 500 000 tensors

Pure: callers bring the bytes, so the same rules serve a local file and a ranged read of a remote one.
"""

from typing import Any, Final

from modelswap_engine.checkpoint import strict_json
from modelswap_engine.checkpoint.manifest import TensorEntry
from modelswap_engine.checkpoint.rules import check_tensor_name, expected_nbytes, refuse, shown
from modelswap_engine.protocol.errors import UnsupportedFormat

PREFIX_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
MAX_TENSORS: Final = 500_000
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
_MAGIC: Final = ((b"PK\x03\x04", "a zip (PyTorch pickle)"), (b"GGUF", "GGUF"), (b"\x80\x02", "a pickle"))


def header_length(prefix: bytes, *, file_size: int, file: str) -> int:
    """Return N from the first bytes of a file (rules H1 and H2).

    Raises:
        InvalidCheckpoint: a rule is broken.
        UnsupportedFormat: the file is of another format.
    """
    if len(prefix) < PREFIX_BYTES:
        refuse(f"{file_size} bytes are too few for a safetensors file", file=file)
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        _refuse_other_format(prefix, file=file)
        refuse(f"header length {length} is not in 2..{MAX_HEADER_BYTES}", file=file)
    if PREFIX_BYTES + length > file_size:
        refuse(f"truncated: {PREFIX_BYTES + length} bytes of header, the file has {file_size}", file=file)
    return length


def _refuse_other_format(prefix: bytes, *, file: str) -> None:
    # Only asked about impossible lengths: the first bytes of a good file may spell a magic by accident.
    for magic, kind in _MAGIC:
        if prefix.startswith(magic):
            raise UnsupportedFormat(
                f"{file}: the content is {kind}, whatever the name says",
                advice="convert the checkpoint to safetensors",
                details={"file": file},
            )


def parse_header(header: bytes, *, file_size: int, file: str) -> tuple[TensorEntry, ...]:
    """Return the tensors of a header (rules H3 to H13) by rising offset, hashes unknown.

    Raises:
        InvalidCheckpoint: a rule is broken; the message names file and tensor.
    """
    if not header.startswith(b"{"):
        refuse("the header does not start with '{'", file=file)
    fields = strict_json.loads(header, file=file)
    _check_metadata(fields.pop("__metadata__", {}), file=file)
    if len(fields) > MAX_TENSORS:
        refuse(f"{len(fields)} tensors; at most {MAX_TENSORS} are allowed", file=file)
    start = PREFIX_BYTES + len(header)
    entries = [_entry(name, value, start=start, file_size=file_size, file=file) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(entries, start=start, file_size=file_size, file=file)
    return tuple(entries)


def _check_metadata(metadata: Any, *, file: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse("__metadata__ does not map strings to strings", file=file)


def _entry(name: str, value: Any, *, start: int, file_size: int, file: str) -> TensorEntry:
    check_tensor_name(name, file=file)
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        refuse("the entry does not consist of dtype, shape and data_offsets", file=file, tensor=name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        refuse("dtype is not a string", file=file, tensor=name)
    if not _is_int_list(shape) or not _is_int_list(offsets) or len(offsets) != 2:
        refuse("shape or data_offsets is not a list of integers (two for data_offsets)", file=file, tensor=name)
    nbytes = expected_nbytes(dtype, tuple(shape), file=file, tensor=name)
    begin, end = offsets
    data_bytes = file_size - start
    if not 0 <= begin <= end <= data_bytes:
        why = "the file is truncated" if 0 <= begin <= end else "begin and end are out of order"
        refuse(f"data_offsets {shown(str(offsets))} of {data_bytes} data bytes: {why}", file=file, tensor=name)
    if end - begin != nbytes:
        refuse(f"{end - begin} bytes of data, but {dtype} {shape} means {nbytes}", file=file, tensor=name)
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), nbytes=nbytes, file=file, offset=start + begin)


def _is_int_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)  # bool is an int to isinstance


def _check_cover(entries: list[TensorEntry], *, start: int, file_size: int, file: str) -> None:
    position = start
    for entry in entries:
        if entry.offset < position:
            refuse(f"overlaps the tensor before it by {position - entry.offset} bytes", file=file, tensor=entry.name)
        if entry.offset > position:
            refuse(f"{entry.offset - position} bytes before it belong to no tensor", file=file, tensor=entry.name)
        position += entry.nbytes
    if position != file_size:
        refuse(f"{file_size - position} bytes after the last tensor belong to no tensor", file=file)
