"""``<source>.fatbin.lzma``: the fatbin of a source in one stream of LZMA, which src/runtime/unpack.cpp decodes on first use."""

# The code of all GPUs is in one stream, because it is alike. lp and pb are 4 because an instruction of SASS is 16 bytes: what a byte is
# depends on its place in it. zstd, which a fatbin can have itself, takes a third more (docs/internals/design.md).

from __future__ import annotations

import lzma
import struct

SUFFIX = ".fatbin.lzma"
HEADER = struct.Struct("<BIQ")  # of an LZMA file: the properties, the size of the dictionary, the size unpacked
LC, LP, PB = 0, 4, 4
PROPERTIES = (PB * 5 + LP) * 9 + LC
DICTIONARY = 1 << 24  # bytes; the largest fatbin is 13 MB
LARGEST = 1 << 28
SMALLEST = 1 << 12  # dictionary that liblzma takes


def _filters(dictionary: int) -> list[dict[str, int]]:
    preset = 9 | lzma.PRESET_EXTREME
    return [{"id": lzma.FILTER_LZMA1, "preset": preset, "lc": LC, "lp": LP, "pb": PB, "dict_size": dictionary, "nice_len": 273}]


def pack(fatbin: bytes) -> bytes:
    """Any program that reads LZMA files, such as xz, unpacks it."""
    filters = _filters(max(SMALLEST, min(DICTIONARY, len(fatbin))))  # a larger one changes no byte, and takes 25 ms to clear
    return HEADER.pack(PROPERTIES, DICTIONARY, len(fatbin)) + lzma.compress(fatbin, lzma.FORMAT_RAW, filters=filters)


def unpack(data: bytes) -> bytes:
    """The fatbin; a ValueError unless `data` is one whole LZMA file of these properties, up to its last byte."""
    if len(data) < HEADER.size:
        raise ValueError(f"{len(data)} bytes, expected an LZMA file")
    properties, dictionary, size = HEADER.unpack_from(data)
    if (properties, dictionary) != (PROPERTIES, DICTIONARY) or size > LARGEST:
        raise ValueError(f"the header {data[: HEADER.size].hex()}, expected that of an LZMA file with lc={LC} lp={LP} pb={PB}")
    stream = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_filters(DICTIONARY))
    try:
        fatbin = stream.decompress(data[HEADER.size :], size + 1)
        if len(fatbin) <= size and not stream.eof and not stream.needs_input:
            fatbin += stream.decompress(b"", 1)
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(f"what cannot be unpacked ({error}), expected an LZMA stream") from error
    if len(fatbin) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"a stream of {len(fatbin)} bytes, expected one whole stream of {size}")
    return fatbin
