"""Seeds made from several numbers, so that every stream of randomness is a pure function."""

import hashlib


def mix(*parts: int | str) -> int:
    """Hash the parts into a seed of 63 bits: equal parts, equal seed; else unrelated streams."""
    text = "/".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
