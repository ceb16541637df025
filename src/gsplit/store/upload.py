"""Copy a store to object storage, with the checksums that its rows are read by.

The manifest is written last, so a store that was not copied completely cannot be opened. To replace a store, its
manifest is removed first.
"""

import hashlib
from math import prod

from gsplit.array_types import Array
from gsplit.errors import InputError, StoreError, explain
from gsplit.files.objects import ObjectFolder, as_url
from gsplit.progress import Progress, silent
from gsplit.store.files import expected_bytes, npy_header, raw_bytes
from gsplit.store.manifest import ArrayEntry, file_of
from gsplit.store.reader import Store
from gsplit.store.remote import blocks_of, rows_per_block
from gsplit.store.verify import verify_checksums

__all__ = ["upload_store"]


def upload_store(store: Store, url: str, *, overwrite: bool = False, progress: Progress = silent) -> None:
    """Copy a store to a URL such as ``s3://BUCKET/NAME.gsplit``. An array with another checksum is refused."""
    place = as_url(url)
    if place is None or not place.partition("?")[0].endswith(".gsplit"):
        raise InputError(explain("URL", "s3://BUCKET/NAME.gsplit, or of another object storage", url, "give a URL"))
    objects = ObjectFolder(place)
    is_there = objects.size("manifest.json") is not None
    if is_there and not overwrite:
        fix = "choose another name, or pass --overwrite"
        raise StoreError(explain(objects.url, "no store at this URL", "a store", fix))
    for name, entry in store.manifest.arrays.items():
        objects.check_size(file_of(name), expected_bytes(entry.dtype, entry.shape))
    verify_checksums(store, progress)
    if is_there:
        objects.remove("manifest.json")
    for done, (name, entry) in enumerate(sorted(store.manifest.arrays.items()), 1):
        array = store.stored_array(name)
        objects.write(file_of(name), [npy_header(entry.dtype, entry.shape), raw_bytes(array)])
        if name.startswith("features/"):
            objects.write(blocks_of(name), [_digests(array, entry)])
        progress("upload", done, len(store.manifest.arrays))
    objects.write("manifest.json", [store.manifest.as_json().encode()])


def _digests(array: Array, entry: ArrayEntry) -> bytes:
    """The checksum of an array, then those of the blocks of its rows (``remote.RowBlocks``)."""
    step = rows_per_block(prod(entry.shape[1:]) * array.itemsize)
    blocks = (hashlib.sha256(raw_bytes(array[at : at + step])).digest() for at in range(0, array.shape[0], step))
    return bytes.fromhex(entry.sha256) + b"".join(blocks)
