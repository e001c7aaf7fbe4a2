"""What a ciphertext and a key of CKKS look like as bytes, checked before SEAL reads any of them.

TenSEAL writes protocol buffers around SEAL's objects, and SEAL compresses those with zstd. Both read more
than they write: other sizes, other compressions, bytes after the end; and before version 4.3, which TenSEAL
has since 0.3.18, SEAL unpacked whatever it was given: 33 KB of it to gigabytes. So what is due is taken apart
here into the one form that it has, unpacked into as many bytes as it must have, and handed on uncompressed:
SEAL sees the head that we know and the numbers behind it, which it checks against the modulus. Bytes only: no
keys, no contexts, no files.
"""

from __future__ import annotations

import struct

import pyarrow

from securefl.crypto.ckks_terms import Parameters

_MAGIC = b"\x5e\xa1\x10"  # of an object of SEAL, and the size of its header
_HEADER = 16
_PLAIN, _ZSTD = 0, 2  # how an object is compressed
_PARMS_ID = 32


def _varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number == low else bytes([low | 128]) + _varint(number >> 7)


def _sized(tag: int, data: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
    return bytes([tag]) + _varint(len(data)) + data


def _object(version: bytes, content: bytes) -> bytes:
    """An object of SEAL that is not compressed."""
    return _MAGIC + version + struct.pack("<BHQ", _PLAIN, 0, _HEADER + len(content)) + content


def _unpacked(data: bytes, head: bytes, values: int) -> bytes:
    """SEAL's compressed object, uncompressed: after the parameters' hash `head`, and so many numbers.

    Raises ValueError for anything else. No more is unpacked than it must have.
    """
    version, inner = data[3:5], struct.pack("<BHQ", _PLAIN, 0, _HEADER + 8 + 8 * values)
    if data[:3] != _MAGIC or data[5:_HEADER] != struct.pack("<BHQ", _ZSTD, 0, len(data)):
        raise ValueError("not one compressed object")
    size = _PARMS_ID + len(head) + _HEADER + 8 + 8 * values
    try:
        content = bytes(pyarrow.decompress(data[_HEADER:], size, codec="zstd", asbytes=True))
    except OSError:
        raise ValueError("it does not unpack to its size") from None
    at = _PARMS_ID + len(head)
    numbers = _MAGIC + version + inner + struct.pack("<Q", values)
    if content[_PARMS_ID : at + _HEADER + 8] != head + numbers:
        raise ValueError("another object than is due")
    return _object(version, content)


def ciphertext(frame: bytes, parameters: Parameters) -> bytes:
    """A serialised CKKS vector of one ciphertext of two polynomials, as SEAL reads it uncompressed.

    Raises ValueError for anything that they would not have written for these parameters.
    """
    degree, scale = parameters.poly_modulus_degree, struct.pack("<d", 2.0**parameters.scale_bits)
    before, after = _sized(0x0A, _varint(parameters.slots)), b"\x19" + scale
    found = frame[frame.find(_MAGIC) : -len(after)]
    if frame != before + _sized(0x12, found) + after:
        raise ValueError("not one ciphertext")
    # In NTT form; two polynomials of so many coefficients modulo one prime; the scale; no correction factor.
    head = b"\x01" + struct.pack("<QQQ", 2, degree, 1) + scale + struct.pack("<Q", 1)
    return before + _sized(0x12, _unpacked(found, head, 2 * degree)) + after


def secret_context(data: bytes, public: bytes, parameters: Parameters) -> bytes:
    """A context with a secret key in it, as TenSEAL reads it uncompressed.

    public: `ckks.public_context` of the parameters, which is all else that there may be in it. Raises
    ValueError for anything that a silo with this version of SEAL would not have written; SEAL itself refuses
    other versions.
    """
    cut = len(public) - 2  # the kind of encryption comes after the key
    found = data[data.find(_MAGIC, cut) : -2]
    values = 2 * parameters.poly_modulus_degree  # of each coefficient, its remainders modulo two primes
    if data[:cut] + data[-2:] != public or data[cut:-2] != _sized(0x1A, _sized(0x0A, found)):
        raise ValueError("not a context of these parameters")
    head = struct.pack("<Qd", values, 1.0)
    key = _sized(0x1A, _sized(0x0A, _unpacked(found, head, values)))
    return public[:cut] + key + public[cut:]
