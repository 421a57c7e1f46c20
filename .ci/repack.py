"""Write a source archive anew, with the time of SOURCE_DATE_EPOCH, so that one commit gives one archive.

setuptools puts the time of the build into the archive and its files.

Example:
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) python .ci/repack.py dist/modeling_tnn-0.1.0.tar.gz
"""

import argparse
import gzip
import io
import os
import tarfile
from pathlib import Path


def repack(archive: Path, time: int):
    """Sort the members, and set their times and owners."""
    packed = io.BytesIO()
    with tarfile.open(archive) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member)
            member.mtime, member.pax_headers = time, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, content)
    archive.write_bytes(gzip.compress(packed.getvalue(), mtime=time))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    repack(parser.parse_args().archive, int(os.environ["SOURCE_DATE_EPOCH"]))


if __name__ == "__main__":
    main()
