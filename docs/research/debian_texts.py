"""Build a text of more than 100 million distinct tokens, prose and code, from packages of Debian and folders of books.

    text/train-*.parquet, text/validation-*.parquet    columns text and source, in parts of less than 60 MiB
    tokenizer                                          a byte-level BPE of 32,768, from the first texts
    manifest.json                                      version, SHA-256, licences and size of each package; tokens
    copyright                                          debian/copyright of each package

A document is a file of a package, or a novel or an article of a folder. Paragraphs of 100 letters and more that were
there before are left out, licences above source text first of all. Documents are in the order of the SHA-256 of their
names, one in 200 is for validation. A package gives at most 12 million letters, of the first documents in this order,
and none if it has no file copyright. The same versions of packages give the same text. `apt-get update` first.

Example:
    python docs/research/debian_texts.py --books classic_books --wikitext wikitext --output_dir texts/debian
    tnn pretrain --dataset_name texts/debian/text --tokenizer_name texts/debian/tokenizer --documents rows
"""

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow
from datasets import Dataset, load_dataset
from pyarrow import parquet
from texts import articles, whole

from modeling_tnn.data.text import train_tokenizer
from tnn_programs.cli.atomic import write_json

PACKAGES = (
    "anarchism ansible apache2-doc bind9-doc cppreference-doc-en-html debian-handbook debian-policy "
    "debian-reference-en developers-reference dict-devil dict-foldoc dict-jargon dict-vera dict-wn "
    "emacs-el erlang-doc freebsd-manpages ghc-doc git-doc golang-1.19-src installation-guide-amd64 "
    "libboost1.74-dev libboost1.74-doc libeigen3-dev libreoffice-help-en-us libruby3.1 linux-doc-6.1 "
    "llvm-14-dev manpages maxima-doc mercurial-common nmap-common nodejs-doc octave-doc perl-doc "
    "perl-modules-5.36 postgresql-doc-15 python-django-doc python-pandas-doc python-scipy-doc python-sklearn-doc "
    "python-sympy-doc python3-django python3-matplotlib python3-networkx python3-numpy python3-pandas python3-scipy "
    "python3-sklearn python3-sqlalchemy python3-sympy python3-torch python3-twisted python3.11-doc qtbase5-doc-html "
    "qtdeclarative5-doc-html r-doc-html racket-doc rust-doc rust-src sqlite3-doc vim-runtime"
)
NAMES = "txt md rst pod html htm tex texi py go rs c h hpp ipp el pm pl rb vim lua nse yml erl hs jl dict.dz"
IS_TEXT = re.compile(rf"\.({NAMES.replace(' ', '|')})(\.gz)?$|/man/man\d/[^/]*\.gz$|/Eigen/src/")
UNSEEN = re.compile(r"(?is)<(script|style|head|nav|footer|header)\b.*?</\1>|<!--.*?-->")
BLOCK = re.compile(r"(?i)</?(p|div|h\d|li|tr|pre|dt|dd|table|ul|ol|dl|section|br)\b[^>]*>")
PARAGRAPH, LEAST, PIECE, MOST_OF_PACKAGE = 100, 200, 400_000, 12_000_000  # letters
OF_PART, OF_TOKENIZER = 120_000_000, 20_000_000  # letters
VALIDATION, COUNTED, VOCABULARY = 200, 50, 32768


def key(name: str) -> bytes:
    """What documents are ordered by."""
    return hashlib.sha256(name.encode()).digest()


def content(name: str, data: bytes) -> str | None:
    """The text of a file of a package; None if it is not UTF-8, or has lines that no person wrote."""
    try:
        text = (gzip.decompress(data) if name.endswith((".gz", ".dz")) else data).decode()
    except (UnicodeDecodeError, OSError):
        return None
    if re.search(r"\.html?(\.gz)?$", name):
        text = html.unescape(re.sub(r"<[^>]*>", "", BLOCK.sub("\n\n", UNSEEN.sub("", text))))
        text = re.sub(r"\n\s*\n\s*", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()
    return None if "\0" in text or len(text) > 400 * (1 + text.count("\n")) else text


def read_package(package: str, file: Path) -> tuple[dict[str, str], str | None]:
    """The documents of a package by their paths, and its copyright."""
    found, licence = {}, None
    reader = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", file], stdout=subprocess.PIPE)  # noqa: S603, S607
    with reader, tarfile.open(fileobj=reader.stdout, mode="r|") as members:
        for member in filter(tarfile.TarInfo.isfile, members):
            if member.name == f"./usr/share/doc/{package}/copyright":
                licence = members.extractfile(member).read().decode(errors="replace")
            elif IS_TEXT.search(member.name) and (text := content(member.name, members.extractfile(member).read())):
                found[f"{package}{member.name[1:]}"] = text
    return found, licence


def chosen(documents: dict[str, str], seen: set[bytes]) -> dict[str, str]:
    """The first documents, without long paragraphs that are in `seen`, to which the others are added."""
    found, size = {}, 0
    for name in sorted(documents, key=key):
        kept = []
        for paragraph in documents[name].split("\n\n") if size < MOST_OF_PACKAGE else ():
            digest = hashlib.blake2b(" ".join(paragraph.split()).encode(errors="ignore"), digest_size=8).digest()
            if len(paragraph) < PARAGRAPH or digest not in seen:
                kept.append(paragraph)
                seen.update([digest] if len(paragraph) >= PARAGRAPH else [])
        size += len(documents[name])
        if len(text := "\n\n".join(kept).encode(errors="ignore").decode()) >= LEAST:  # Arrow holds no surrogates
            found[name] = text
    return found


def rows_of(documents: dict[str, str]) -> Dataset:
    """Pieces of the documents, in their order."""
    starts = ((name, i) for name in sorted(documents, key=key) for i in range(0, len(documents[name]), PIECE))
    return Dataset.from_list(
        [{"text": documents[name][i : i + PIECE], "source": name.split("/")[0]} for name, i in starts]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", nargs="+", default=PACKAGES.split())
    parser.add_argument("--books", help="Folder of novels, as that of texts.py.")
    parser.add_argument("--wikitext", help="Hub id or folder of WikiText.")
    parser.add_argument("--output_dir", type=Path, default=Path("texts/debian"))
    args = parser.parse_args()
    debs, copyrights, text = (args.output_dir / name for name in ("debs", "copyright", "text"))
    for folder in (debs, copyrights, text):
        folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-q", *args.packages], cwd=debs, check=True)  # noqa: S603, S607
    found = {"books": whole(load_dataset(args.books)["train"])} if args.books else {}
    lines = load_dataset(args.wikitext, "wikitext-2-v1")["train"]["text"] if args.wikitext else []
    found["wikitext"] = {str(i): article for i, article in enumerate(articles(lines))}
    documents, manifest, seen = {}, {}, set()
    for source in (*sorted(args.packages), *found):
        about, own = {}, {f"{source}/{name}": one for name, one in found.get(source, {}).items()}
        if source not in found:
            file = max(debs.glob(f"{source}_*.deb"))
            own, licence = read_package(source, file)
            (copyrights / source).write_text(licence or "")
            names = sorted(set(re.findall(r"(?m)^License:[ \t]*(\S.*)$", licence or ""))) or ["see copyright"]
            about = {"version": file.name.split("_")[1], "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
            about["licences"], own = (names, own) if licence else (["no file copyright: left out"], {})
        own = chosen(own, seen)
        manifest[source] = about | {"documents": len(own), "letters": sum(map(len, own.values()))}
        documents |= own
        sys.stderr.write(f"{source}: {manifest[source]['letters']:,} letters of {len(own):,} documents\n")
    held_out = {name for name in documents if int.from_bytes(key(name)[-4:]) % VALIDATION == 0}
    splits = {"train": rows_of({name: one for name, one in documents.items() if name not in held_out})}
    splits["validation"] = rows_of({name: documents[name] for name in held_out})
    for split, rows in splits.items():
        parts = 1 + sum(map(len, rows["text"])) // OF_PART
        for i in range(parts):
            part = pyarrow.table(rows.shard(parts, i)[:])
            parquet.write_table(part, text / f"{split}-{i:05}-of-{parts:05}.parquet", compression="zstd")
    rows, letters = splits["train"], sum(map(len, splits["train"]["text"]))
    tokenizer = train_tokenizer(
        rows.select(range(1 + (len(rows) - 1) * OF_TOKENIZER // max(letters, OF_TOKENIZER))), VOCABULARY
    )
    tokenizer.save_pretrained(args.output_dir / "tokenizer")
    sample = rows[::COUNTED]["text"]
    rate = sum(map(len, tokenizer(sample)["input_ids"])) / sum(map(len, sample))
    about = {"letters": letters, "rows": len(rows), "letters_per_token": 1 / rate, "tokens": round(letters * rate)}
    write_json(args.output_dir / "manifest.json", {"train": about, "sources": manifest})
    sys.stdout.write(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
