"""Copy a store to object storage, with the checksums that its rows are read by.

The manifest is written last: until then there is no store at the URL. To replace a store, its manifest is removed
first. Arrays are compared with their checksums before they are copied.
"""

import hashlib
from math import prod

from gsplit.array_types import Array
from gsplit.errors import InputError, StoreError, explain
from gsplit.files.objects import ObjectFolder, as_url
from gsplit.progress import Progress, silent
from gsplit.store.files import npy_header, raw_bytes
from gsplit.store.manifest import ArrayEntry, file_of
from gsplit.store.reader import Store
from gsplit.store.remote import blocks_of, rows_per_block
from gsplit.store.source import row_slices

__all__ = ["upload_store"]


def upload_store(store: Store, url: str, *, overwrite: bool = False, progress: Progress = silent) -> None:
    """Copy a store to a URL such as ``s3://BUCKET/NAME.gsplit``. An array with another checksum is refused."""
    place = as_url(url)
    if place is None or not place.partition("?")[0].endswith(".gsplit"):
        raise InputError(explain("URL", "s3://BUCKET/NAME.gsplit, or of another object storage", url, "give a URL"))
    objects = ObjectFolder(place)
    if objects.size("manifest.json") is not None:
        if not overwrite:
            fix = "choose another name, or pass --overwrite"
            raise StoreError(explain(objects.url, "no store at this URL", "a store", fix))
        objects.remove("manifest.json")
    for done, (name, entry) in enumerate(sorted(store.manifest.arrays.items()), 1):
        array = store.stored_array(name)
        _check(store, name, array, entry)
        objects.write(file_of(name), [npy_header(entry.dtype, entry.shape), raw_bytes(array)])
        if name.startswith("features/"):
            objects.write(blocks_of(name), [_digests(array, entry)])
        progress("upload", done, len(store.manifest.arrays))
    objects.write("manifest.json", [store.manifest.as_json().encode()])


def _check(store: Store, name: str, array: Array, entry: ArrayEntry) -> None:
    digest = hashlib.sha256()
    for piece in row_slices(array.shape[0], array[:1].nbytes):
        digest.update(raw_bytes(array[piece]))
    if digest.hexdigest() != entry.sha256:
        fix = "restore the file from a copy, or import the graph again"
        raise StoreError(explain(f"{store.where}: {file_of(name)}", entry.describe(), digest.hexdigest()[:16], fix))


def _digests(array: Array, entry: ArrayEntry) -> bytes:
    """The checksum of an array, then those of the blocks of its rows (``remote.RowBlocks``)."""
    step = rows_per_block(prod(entry.shape[1:]) * array.itemsize)
    blocks = (hashlib.sha256(raw_bytes(array[at : at + step])).digest() for at in range(0, array.shape[0], step))
    return bytes.fromhex(entry.sha256) + b"".join(blocks)
